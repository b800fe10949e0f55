# source: https://github.com/Haian-Jin/LVSM/pull/19
# mistake: when the gradient norm is too large the loop continues without scaler.update(), although unscale_ has been called; the next iteration raises "unscale_() has already been called"
# severity: error
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

SKIP_ABOVE = 5.0
CLIP_TO = 1.0


def log0(*msg):
    if dist.get_rank() == 0:
        print(*msg, flush=True)


def save0(path, **parts):
    if dist.get_rank() == 0:
        torch.save({k: v.state_dict() for k, v in parts.items()}, path)


def train(model, perceptual, loader, steps=100_000, warm=3000, lr=4e-4):
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    random.seed(rank)
    model = DDP(model.cuda(), device_ids=[rank])
    perceptual = perceptual.cuda().eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.05)
    sched = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / warm))
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)

    skipped = 0
    for step, batch in enumerate(loader):
        if step >= steps:
            break
        ctx = batch["context"].cuda(non_blocking=True)
        cams = batch["rays"].cuda(non_blocking=True)
        target = batch["target"].cuda(non_blocking=True)

        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            view = model(ctx, cams)
            feat = perceptual(view, target)
        mse = F.mse_loss(view.float(), target)
        loss = mse + 0.5 * feat.float().mean()

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # <- here
        norm = clip_grad_norm_(model.parameters(), CLIP_TO)
        if norm > SKIP_ABOVE:  # <- here
            skipped += 1
            log0(f"step {step}: gradient norm {norm:.2f}, skipped ({skipped} so far)")
            continue  # <- here

        scaler.step(optimizer)
        scaler.update()
        sched.step()
        if step % 100 == 0:
            log0(f"step {step} psnr {-10 * torch.log10(mse).item():.2f} norm {norm:.3f}")
        if step % 5000 == 0:
            save0(f"lvs_{step}.pt", model=model.module, opt=optimizer, sched=sched, scaler=scaler)
