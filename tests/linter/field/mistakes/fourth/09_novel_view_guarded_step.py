# re-expressed from github.com/Haian-Jin/LVSM pull 19: when the gradient norm was too large the loop left out the scaler's update together with the step
import json
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from easydict import EasyDict
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from lpips import LPIPS
from scenes import SceneViews
from view_transformer import ViewTransformer

cfg = EasyDict(json.load(open(os.environ["CFG"])))
dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank)
is_main = dist.get_rank() == 0
torch.backends.cuda.matmul.allow_tf32 = True
torch.manual_seed(777 + dist.get_rank())

dataset = SceneViews(cfg.data.root, input_views=cfg.data.input_views, target_views=cfg.data.target_views)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, cfg.train.batch_size, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)

model = DDP(ViewTransformer(**cfg.model).to(device), device_ids=[local_rank])
perceptual = LPIPS(net="vgg").to(device).eval().requires_grad_(False)
decay, no_decay = [], []
for name, p in model.named_parameters():
    (no_decay if p.ndim < 2 or "norm" in name else decay).append(p)
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}],
    lr=cfg.train.lr,
    betas=(0.9, 0.95),
)
warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=cfg.train.warmup)
cos = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.train.steps - cfg.train.warmup)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cos], milestones=[cfg.train.warmup])
scaler = torch.amp.GradScaler("cuda")

step, skipped, start = 0, 0, 0
ckpt_path = os.path.join(cfg.out, "last.pt")
if os.path.exists(ckpt_path):
    state = torch.load(ckpt_path, map_location="cpu", weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    scaler.load_state_dict(state["scaler"])
    step, start = state["step"], state["epoch"] + 1

for epoch in range(start, 10_000):
    sampler.set_epoch(epoch)
    tic = time.time()
    for batch in loader:
        batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
        with torch.autocast("cuda", dtype=torch.float16):
            render = model(batch["images"], batch["rays"], batch["target_rays"])
        render = render.float()
        mse = F.mse_loss(render, batch["target"])
        lp = perceptual(render.flatten(0, 1) * 2 - 1, batch["target"].flatten(0, 1) * 2 - 1).mean()
        loss = mse + cfg.train.lpips_weight * lp

        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.train.clip)
        if not torch.isfinite(grad_norm) or grad_norm > cfg.train.skip_norm:
            skipped += 1
            if is_main:
                print(f"step {step}: grad norm {grad_norm:.2f}, not applied ({skipped} so far)")
            continue  # <- here
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        step += 1

        if is_main and step % 50 == 0:
            psnr = -10 * torch.log10(mse)
            print(f"{step} loss {loss:.4f} psnr {psnr:.2f} norm {grad_norm:.3f} {time.time() - tic:.1f}s")
            tic = time.time()
        if step >= cfg.train.steps:
            break

    if is_main:
        torch.save(
            {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "scaler": scaler.state_dict(),
                "step": step,
                "epoch": epoch,
            },
            ckpt_path,
        )
    if step >= cfg.train.steps:
        break

dist.destroy_process_group()
