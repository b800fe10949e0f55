# why correct: only the closing micro-batch of a window synchronises, and unscaling, clipping and stepping follow that one backward
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def windows(loader, size):
    buf = []
    for batch in loader:
        buf.append(batch)
        if len(buf) == size:
            yield buf
            buf = []
    if buf:
        yield buf


def micro_backward(model, scaler, batch, share, sync):
    ctx = contextlib.nullcontext() if sync else model.no_sync()
    x, y = (t.cuda(non_blocking=True) for t in batch)
    with ctx:
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * share).backward()
    return loss.detach()


def update(model, optimizer, scaler, scheduler, max_norm):
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if scaler.get_scale() >= before:
        scheduler.step()


def train_epoch(model, loader, optimizer, scaler, scheduler, accumulate):
    model.train()
    total = torch.zeros((), device="cuda")
    for group in windows(loader, accumulate):
        for j, batch in enumerate(group):
            total += micro_backward(model, scaler, batch, 1.0 / len(group), sync=j == len(group) - 1)
        update(model, optimizer, scaler, scheduler, 1.0)
    dist.all_reduce(total)
    return total.item() / (len(loader) * dist.get_world_size())


def main(build_model, dataset, epochs=90, accumulate=4):
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(build_model()).cuda(), device_ids=[rank])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9, weight_decay=5e-5)
    per_epoch = -(-len(loader) // accumulate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * per_epoch)
    scaler = GradScaler("cuda")
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer, scaler, scheduler, accumulate)
        if dist.get_rank() == 0:
            print(f"{epoch}: {loss:.4f}")
            torch.save(
                {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "scaler": scaler.state_dict(),
                },
                "last.pt",
            )
    dist.destroy_process_group()
