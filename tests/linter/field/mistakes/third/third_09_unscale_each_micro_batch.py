import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms
from torchvision.models import resnet50

EPOCHS = 90
ACCUM = 4
RESUME = os.environ.get("RESUME", "")


def setup():
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    return rank


def save(path, epoch, model, optimizer, scheduler, scaler):
    if dist.get_rank() == 0:
        torch.save({
            "epoch": epoch,
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "scaler": scaler.state_dict(),
        }, path)


def main():
    rank = setup()
    tf = transforms.Compose([
        transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])
    data = datasets.ImageFolder("/data/imagenet/train", tf)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, 64, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    model = DDP(resnet50().cuda(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0 ** 14)
    start = 0
    if RESUME:
        ckpt = torch.load(RESUME, map_location=f"cuda:{rank}")
        model.module.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        scheduler.load_state_dict(ckpt["scheduler"])
        scaler.load_state_dict(ckpt["scaler"])
        start = ckpt["epoch"] + 1

    for epoch in range(start, EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        optimizer.zero_grad(set_to_none=True)
        for i, (x, y) in enumerate(loader):
            if i >= len(loader) // ACCUM * ACCUM:
                break
            x, y = x.cuda(rank, non_blocking=True), y.cuda(rank, non_blocking=True)
            last = (i + 1) % ACCUM == 0
            with nullcontext() if last else model.no_sync():
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = F.cross_entropy(model(x), y)
                    loss = loss / ACCUM
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)  # <- here
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
            if rank == 0 and i % 100 == 0:
                print(f"epoch {epoch} iter {i} loss {loss.item() * ACCUM:.4f}")
        scheduler.step()
        save(f"ckpt_{epoch:03d}.pt", epoch, model, optimizer, scheduler, scaler)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
