# why correct: forward and backward of all micro-batches but the last are inside no_sync, each loss is divided by the window, and bfloat16 needs no scaler
import os
from contextlib import nullcontext
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from retina.fundus import FundusPairs
from retina.vit import VisionEncoder

ACCUM = 8
BATCH = 24
EPOCHS = 30


def groups(iterable, n):
    it = iter(iterable)
    while chunk := list(islice(it, n)):
        yield chunk


def contrast(a, b, temperature=0.07):
    a = F.normalize(a.float(), dim=-1)
    b = F.normalize(b.float(), dim=-1)
    with torch.autocast("cuda", enabled=False):
        logits = a @ b.t() / temperature
    target = torch.arange(len(a), device=a.device)
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


def window_step(ddp, optimizer, window, device):
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=device)
    for k, (left, right) in enumerate(window):
        last = k == len(window) - 1
        with nullcontext() if last else ddp.no_sync():
            with torch.autocast("cuda", dtype=torch.bfloat16):
                both = ddp(torch.cat([left, right]).to(device, non_blocking=True))
                loss = contrast(*both.chunk(2)) / len(window)
            loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 3.0)
    optimizer.step()
    return total, norm


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    ddp = DistributedDataParallel(VisionEncoder(out=256).to(device), device_ids=[local])
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-4, weight_decay=0.05)
    data = FundusPairs("fundus")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=6, drop_last=True)
    plan = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        ddp.train()
        for step, window in enumerate(groups(loader, ACCUM)):
            total, norm = window_step(ddp, optimizer, window, device)
            if step % 20 == 0:
                dist.all_reduce(total, op=dist.ReduceOp.AVG)
                if dist.get_rank() == 0:
                    print(f"{epoch}.{step}: {total.item():.4f} ({norm.item():.2f})")
        plan.step()
        if dist.get_rank() == 0:
            torch.save(ddp.module.state_dict(), "retina.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
