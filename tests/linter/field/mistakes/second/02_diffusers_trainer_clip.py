"""
# source: https://github.com/harubaru/waifu-diffusion/issues/64
# mistake: in fp16 the gradients are clipped to norm 1 before the scaler has unscaled them.
# severity: error
# torch: any
"""
import argparse

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from latents import BucketLoader
from modules import load_stack


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=5e-6)
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--ucg", type=float, default=0.1)
    p.add_argument("--fp16", action="store_true")
    p.add_argument("--use_ema", action="store_true")
    p.add_argument("--log_every", type=int, default=50)
    return p.parse_args()


args = parse()
torch.distributed.init_process_group("nccl")
rank = torch.distributed.get_rank()
torch.cuda.set_device(rank)

unet, vae, text_encoder, scheduler = load_stack("sd-v1-4", device=rank)
vae.requires_grad_(False)
text_encoder.requires_grad_(False)
unet = DDP(unet, device_ids=[rank])
optimizer = torch.optim.AdamW(unet.parameters(), lr=args.lr, betas=(0.9, 0.999), weight_decay=1e-2)
scaler = torch.cuda.amp.GradScaler(enabled=args.fp16)
loader = BucketLoader("train", rank=rank)


def get_loss(batch):
    with torch.no_grad():
        latents = vae.encode(batch["pixels"].to(rank)).latent_dist.sample() * 0.18215
        context = text_encoder(batch["ids"].to(rank)).last_hidden_state
    noise = torch.randn_like(latents)
    steps = torch.randint(0, scheduler.num_train_timesteps, (latents.size(0),), device=latents.device)
    with torch.autocast("cuda", dtype=torch.float16, enabled=args.fp16):
        pred = unet(scheduler.add_noise(latents, noise, steps), steps, context)
        return F.mse_loss(pred.float(), noise.float(), reduction="mean")


global_step = 0
for epoch in range(args.epochs):
    unet.train()
    for batch in loader:
        loss = get_loss(batch)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)  # <- here
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        global_step += 1
        if rank == 0 and global_step % args.log_every == 0:
            print(f"epoch {epoch} step {global_step} loss {loss.item():.4f}")
