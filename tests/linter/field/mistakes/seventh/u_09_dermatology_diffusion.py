# source: https://github.com/lucidrains/med-seg-diff-pytorch/pull/6
# mistake: the loss is back-propagated with loss.backward() instead of accelerator.backward(loss), so in fp16 it is never scaled although the prepared optimizer unscales the gradients
# severity: error
import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.optim import AdamW
from torch.utils.data import DataLoader


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--out", type=Path, default=Path("runs/derm"))
    p.add_argument("--epochs", type=int, default=200)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--grad-accum", type=int, default=2)
    return p.parse_args()


def noise_schedule(steps=1000):
    betas = torch.linspace(1e-4, 0.02, steps)
    return torch.cumprod(1.0 - betas, dim=0)


def denoising_loss(unet, mask, image, alpha_bar):
    t = torch.randint(0, alpha_bar.numel(), (mask.size(0),), device=mask.device)
    a = alpha_bar[t].view(-1, 1, 1, 1)
    eps = torch.randn_like(mask)
    noisy = a.sqrt() * mask + (1 - a).sqrt() * eps
    return F.mse_loss(unet(noisy, t, image).float(), eps)


def train(args, unet, dataset):
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=args.grad_accum)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, num_workers=4)
    optim = AdamW(unet.parameters(), lr=args.lr, betas=(0.95, 0.999))
    unet, optim, loader = accelerator.prepare(unet, optim, loader)
    alpha_bar = noise_schedule().to(accelerator.device)

    for epoch in range(args.epochs):
        unet.train()
        running = 0.0
        for image, mask in loader:
            with accelerator.accumulate(unet):
                loss = denoising_loss(unet, mask, image, alpha_bar)
                loss.backward()  # <- here
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optim.step()
                optim.zero_grad()
            running += loss.item()
        accelerator.print(f"epoch {epoch}: {running / len(loader):.5f}")
        if epoch % 20 == 0:
            accelerator.save_state(str(args.out / f"epoch{epoch}"))


if __name__ == "__main__":
    from derm.data import IsicMasks
    from derm.unet import ConditionedUnet

    cli = parse_args()
    train(cli, ConditionedUnet(in_ch=1, cond_ch=3), IsicMasks(cli.data))
