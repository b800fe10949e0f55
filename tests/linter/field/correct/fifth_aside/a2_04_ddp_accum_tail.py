# why correct: gradients are only unscaled at the boundary or at the last batch, no_sync covers the micro-batches between, and the shorter last group is divided by its own length
import contextlib

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_value_


def grouped(loader, k):
    bucket = []
    for item in loader:
        bucket.append(item)
        if len(bucket) == k:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def panoptic_loss(out, sem, inst_offset, centre):
    a = F.cross_entropy(out["sem"], sem, ignore_index=255)
    b = F.l1_loss(out["offset"], inst_offset)
    c = F.mse_loss(out["centre"], centre)
    return a + 0.01 * b + 200.0 * c


def train_one_epoch(ddp: DistributedDataParallel, loader, optim, scaler, sched, k, device):
    ddp.train()
    history = []
    for bucket in grouped(loader, k):
        last = len(bucket) - 1
        for j, (img, sem, off, cen) in enumerate(bucket):
            sync = contextlib.nullcontext() if j == last else ddp.no_sync()
            with sync:
                with torch.autocast("cuda", dtype=torch.float16):
                    out = ddp(img.to(device))
                    loss = panoptic_loss(out, sem.to(device), off.to(device), cen.to(device))
                scaler.scale(loss / len(bucket)).backward()
            history.append(loss.detach())
        scaler.unscale_(optim)
        clip_grad_value_(ddp.parameters(), 0.1)
        scaler.step(optim)
        scaler.update()
        optim.zero_grad(set_to_none=True)
        sched.step()
    return torch.stack(history).float().mean().item()


def main(net, loader, rank, steps_per_epoch, epochs=60, k=4):
    device = torch.device("cuda", rank)
    ddp = DistributedDataParallel(net.to(device), device_ids=[rank])
    optim = torch.optim.AdamW(ddp.parameters(), lr=5e-4)
    updates = -(-steps_per_epoch // k) * epochs
    sched = torch.optim.lr_scheduler.PolynomialLR(optim, updates, power=0.9)
    scaler = torch.amp.GradScaler("cuda", growth_interval=500)
    optim.zero_grad(set_to_none=True)
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        mean = train_one_epoch(ddp, loader, optim, scaler, sched, k, device)
        if rank == 0:
            print(epoch, mean)
            torch.save(dict(net=ddp.module.state_dict(), optim=optim.state_dict(), sched=sched.state_dict(),
                            scaler=scaler.state_dict(), epoch=epoch), "panoptic.pth")
