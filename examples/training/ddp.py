"""Recipe: DistributedDataParallel (gloo on a CPU, nccl on GPUs), alone or under torchrun.

Prepare first, then wrap. Gradients are averaged before the check for overflow, so all ranks skip together.

    python ddp.py                          starts two processes
    torchrun --nproc-per-node 2 ddp.py     each process is a rank, on one machine or several
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampaudit

RANKS = 2
BATCH = 64


def train(policy: str, device: torch.device) -> list[float]:
    """Train on each rank's part of the batches; return the mean losses over all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    prepared = ampaudit.prepare(model, optimizer, policy=policy, emulate=device.type == "cpu")
    parallel = DistributedDataParallel(prepared.model)
    losses = []
    for step in range(20):
        x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step)).to(device)
        own = x.chunk(ranks)[rank]
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(own), own[:, :4].argmax(1))
        prepared.scaler.scale(loss).backward()
        prepared.scaler.step(optimizer)
        prepared.scaler.update()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
    return losses


def work(policies: Sequence[str]) -> None:
    """Be the rank that the environment names, as torchrun sets it."""
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    for policy in policies:
        losses = train(policy, device)
        if dist.get_rank() == 0:
            print(f"{policy:12} {losses[-1]:.4f}", flush=True)
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


def start(rank: int, policies: Sequence[str]) -> None:
    """Set what torchrun sets, and work."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    work(policies)


if __name__ == "__main__":
    policies = sys.argv[1:] or ("apex-o0", "torch-cuda", "apex-o2")
    if dist.is_torchelastic_launched():
        work(policies)
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        mp.spawn(start, (policies,), nprocs=RANKS)
