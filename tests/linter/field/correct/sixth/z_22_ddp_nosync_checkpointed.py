# why correct: no_sync covers forward and backward of all but the last micro batch, activation checkpointing is non-reentrant, and the scaler is stepped once per group
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Stage(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.units = nn.ModuleList(nn.Sequential(nn.Conv3d(c, c, 3, padding=1), nn.GroupNorm(8, c), nn.SiLU()) for _ in range(n))

    def forward(self, x):
        for u in self.units:
            x = x + checkpoint(u, x, use_reentrant=False)
        return x


class VolumeRegressor(nn.Module):
    def __init__(self, c=64):
        super().__init__()
        self.stem, self.stage = nn.Conv3d(1, c, 7, 4, 3), Stage(c, 6)
        self.head = nn.Linear(c, 1)

    def forward(self, v):
        h = self.stage(self.stem(v))
        return self.head(h.mean((2, 3, 4))).squeeze(-1)


def grouped(loader, k):
    """Yields (batch, is_last) for groups of k; an incomplete final group is left out."""
    n = len(loader) // k * k
    for i, batch in enumerate(loader):
        if i >= n:
            return
        yield batch, (i + 1) % k == 0


def run(rank, loader, epochs=50, k=4):
    model = DistributedDataParallel(VolumeRegressor().to(rank), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=1e-2)
    scaler = GradScaler("cuda")
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        model.train()
        optimizer.zero_grad(set_to_none=True)
        for (volume, age), last in grouped(loader, k):
            with contextlib.nullcontext() if last else model.no_sync():
                with autocast("cuda", dtype=torch.float16):
                    pred = model(volume.to(rank, non_blocking=True))
                    loss = nn.functional.huber_loss(pred.float(), age.to(rank).float()) / k
                scaler.scale(loss).backward()
            if not last:
                continue
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item() * k:.3f}")
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                        "scaler": scaler.state_dict(), "epoch": epoch}, "brainage.pt")


if __name__ == "__main__":
    from mri import distributed_loader

    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    run(local, distributed_loader(batch=2))
    dist.destroy_process_group()
