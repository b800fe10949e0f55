"""Recipe: FSDP2 on two processes. Masters and optimizer state are sharded, and so are the gradients.

So one rank can see an overflow that the other does not: ``group=True`` makes them decide together.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ampaudit

RANKS = 2


def work(rank: int, policy: str, port: int, losses: mp.SimpleQueue) -> None:
    on_gpu = torch.cuda.device_count() >= RANKS
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=RANKS)
    mesh = init_device_mesh(device.type, (RANKS,))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).to(device)
    prepared = ampaudit.prepare(model, policy=policy, emulate=not on_gpu, group=True)
    fully_shard(prepared.model, mesh=mesh)
    optimizer = torch.optim.AdamW(prepared.model.parameters(), lr=3e-3)
    prepared = prepared.stepping(optimizer)
    for step in range(20):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step)).to(device)
        own = x.chunk(RANKS)[rank]
        optimizer.zero_grad()
        loss = F.cross_entropy(prepared.model(own), own[:, :4].argmax(1))
        prepared.scaler.scale(loss).backward()
        prepared.scaler.step(optimizer)
        prepared.scaler.update()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            losses.put(mean.item() / RANKS)
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


def train(policy: str, port: int = 29581) -> list[float]:
    """Mean losses over both ranks."""
    losses = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (policy, port, losses), nprocs=RANKS)
    found = []
    while not losses.empty():
        found.append(losses.get())
    return found


if __name__ == "__main__":
    for index, policy in enumerate(sys.argv[1:] or ("apex-o0", "torch-cuda", "apex-o2")):
        print(f"{policy:12} {train(policy, 29581 + index)[-1]:.4f}")
