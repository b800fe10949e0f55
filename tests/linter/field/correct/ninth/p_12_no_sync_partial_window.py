# why correct: unscale_, clip, step and update run only at window ends, the last partial window is divided by its own length, and no_sync covers the other micro-batches
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_


def window_length(i, total, accum):
    start = (i // accum) * accum
    return min(accum, total - start)


def epoch_loop(model, loader, opt, scaler, accum, clip, device):
    total = len(loader)
    opt.zero_grad(set_to_none=True)
    loss_sum = torch.zeros((), device=device)
    for i, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        boundary = (i + 1) % accum == 0 or i + 1 == total
        with nullcontext() if boundary else model.no_sync():
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss / window_length(i, total, accum)).backward()
        loss_sum += loss.detach()
        if not boundary:
            continue
        scaler.unscale_(opt)
        clip_grad_norm_(model.parameters(), clip)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
    dist.all_reduce(loss_sum)
    return loss_sum.item() / (total * dist.get_world_size())


def main(build_model, build_loader, epochs=30, accum=6, clip=2.0):
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", rank)
    model = DDP(build_model().to(device), device_ids=[rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 10)
    scaler = torch.amp.GradScaler("cuda")
    loader = build_loader(rank)
    for e in range(epochs):
        loader.sampler.set_epoch(e)
        model.train()
        mean = epoch_loop(model, loader, opt, scaler, accum, clip, device)
        sched.step()
        if rank == 0:
            print(e, mean, scaler.get_scale())
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(),
                        "scaler": scaler.state_dict(), "epoch": e}, "last.pt")
    dist.destroy_process_group()
