# why correct: micro-batches under no_sync only accumulate scaled local gradients; the last one synchronizes, and unscale/clip/step/update follow once
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def chunks(loader, n):
    group = []
    for item in loader:
        group.append(item)
        if len(group) == n:
            yield group
            group = []
    if group:
        yield group


def optimize(ddp, group, optimizer, scaler, clip, device):
    total = torch.zeros((), device=device)
    for i, (image, caption) in enumerate(group):
        last = i == len(group) - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            with torch.autocast("cuda", dtype=torch.float16):
                logits = ddp(image.to(device, non_blocking=True), caption[:, :-1].to(device))
                loss = F.cross_entropy(logits.flatten(0, 1), caption[:, 1:].to(device).flatten(), ignore_index=0)
            scaler.scale(loss / len(group)).backward()
        total += loss.detach() / len(group)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(ddp.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return total


def main(build_model, dataset, epochs=20, accum=4):
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)

    model = nn.SyncBatchNorm.convert_sync_batchnorm(build_model()).to(device)
    ddp = DDP(model, device_ids=[rank])
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, 32, sampler=sampler, num_workers=6, pin_memory=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-4, weight_decay=0.05)
    scaler = torch.amp.GradScaler("cuda")
    start = 0
    if os.path.exists("caption.pt"):
        sd = torch.load("caption.pt", map_location=device, weights_only=True)
        model.load_state_dict(sd["model"])
        optimizer.load_state_dict(sd["optimizer"])
        scaler.load_state_dict(sd["scaler"])
        start = sd["epoch"] + 1

    for epoch in range(start, epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for n, group in enumerate(chunks(loader, accum)):
            loss = optimize(ddp, group, optimizer, scaler, 1.0, device)
            if rank == 0 and n % 50 == 0:
                print(epoch, n, loss.item())
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "scaler": scaler.state_dict(), "epoch": epoch}, "caption.pt")
        dist.barrier()
    dist.destroy_process_group()
