# re-expressed from github.com/microsoft/Swin-Transformer issue 311: with accumulation steps the gradients were unscaled on every micro-batch, before the last one had been added
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import models

from two_crops import PairedCrops

CONFIG = SimpleNamespace(
    data="imagenet/train", batch=128, accumulate=4, epochs=200, lr=0.06, temp=0.2, momentum=0.99, queue=65536, clip=1.0
)


class Branch(nn.Module):
    def __init__(self, out=256):
        super().__init__()
        self.net = models.resnet50()
        self.net.fc = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(inplace=True), nn.Linear(2048, out))

    def forward(self, x):
        return F.normalize(self.net(x).float(), dim=1)


class MoCo(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.query, self.key = Branch(), Branch()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.temp, self.m = cfg.temp, cfg.momentum
        self.register_buffer("queue", F.normalize(torch.randn(cfg.queue, 256), dim=1))
        self.register_buffer("ptr", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def advance_key(self):
        for q, k in zip(self.query.parameters(), self.key.parameters()):
            k.lerp_(q, 1 - self.m)

    @torch.no_grad()
    def enqueue(self, keys):
        gathered = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, keys)
        keys = torch.cat(gathered)
        idx = (self.ptr + torch.arange(keys.size(0), device=keys.device)) % self.queue.size(0)
        self.queue[idx] = keys
        self.ptr.copy_((self.ptr + keys.size(0)) % self.queue.size(0))

    def forward(self, a, b):
        q = self.query(a)
        with torch.no_grad():
            k = self.key(b)
        pos = (q * k).sum(1, keepdim=True)
        neg = q @ self.queue.clone().t()
        logits = torch.cat([pos, neg], dim=1).float() / self.temp
        self.enqueue(k.contiguous())
        return F.cross_entropy(logits, torch.zeros(logits.size(0), dtype=torch.long, device=logits.device))


def train_epoch(model, loader, optimizer, scaler, cfg, device):
    model.train()
    total = 0.0
    optimizer.zero_grad(set_to_none=True)
    for step, (a, b) in enumerate(loader, start=1):
        a, b = a.to(device, non_blocking=True), b.to(device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(a, b)
        scaler.scale(loss / cfg.accumulate).backward()
        scaler.unscale_(optimizer)  # <- here
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        if step % cfg.accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            model.module.advance_key()
        total += loss.item()
    return total / len(loader)


def main(cfg):
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(MoCo(cfg)).to(device)
    model = DistributedDataParallel(net, device_ids=[local], broadcast_buffers=False)
    optimizer = torch.optim.SGD(net.query.parameters(), cfg.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.epochs)
    scaler = torch.amp.GradScaler("cuda")
    data = PairedCrops(cfg.data)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, cfg.batch, sampler=sampler, num_workers=10, pin_memory=True, drop_last=True)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer, scaler, cfg, device)
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss:.4f} scale {scaler.get_scale():.0f}")
            torch.save(net.query.net.state_dict(), f"moco_{epoch:03d}.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(CONFIG)
