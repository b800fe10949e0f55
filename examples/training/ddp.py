"""Recipe: DistributedDataParallel on two processes (gloo on a CPU, nccl on GPUs).

Prepare first, then wrap. Gradients are averaged before the check for overflow, so all ranks skip together.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampaudit

RANKS = 2


def work(rank: int, policy: str, port: int, losses: mp.SimpleQueue) -> None:
    on_gpu = torch.cuda.device_count() >= RANKS
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    prepared = ampaudit.prepare(model, optimizer, policy=policy, emulate=not on_gpu)
    parallel = DistributedDataParallel(prepared.model, device_ids=[rank] if on_gpu else None)
    for step in range(20):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step)).to(device)
        own = x.chunk(RANKS)[rank]
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(own), own[:, :4].argmax(1))
        prepared.scaler.scale(loss).backward()
        prepared.scaler.step(optimizer)
        prepared.scaler.update()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            losses.put(mean.item() / RANKS)
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


def train(policy: str, port: int = 29571) -> list[float]:
    """Mean losses over both ranks."""
    losses = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (policy, port, losses), nprocs=RANKS)
    found = []
    while not losses.empty():
        found.append(losses.get())
    return found


if __name__ == "__main__":
    for index, policy in enumerate(sys.argv[1:] or ("apex-o0", "torch-cuda", "apex-o2")):
        print(f"{policy:12} {train(policy, 29571 + index)[-1]:.4f}")
