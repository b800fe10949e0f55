"""
# style of: huggingface/open-muse:training/train_vqgan_with_adversarial.py (simplified)
# correct: two prepared optimizers under bf16, where the accelerator has no scaler; each side is clipped once, right after its own backward.
# torch: 2.0+ (accelerate)
"""
import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed

from data import image_loader
from muse_vq import Discriminator, VQModel


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--max_train_steps", type=int, default=200_000)
    p.add_argument("--max_grad_norm", type=float, default=1.0)
    p.add_argument("--disc_weight", type=float, default=0.05)
    p.add_argument("--checkpoint_every", type=int, default=5000)
    return p.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(13)
    vq, disc = VQModel(), Discriminator()
    opt = torch.optim.AdamW(vq.parameters(), lr=args.lr, betas=(0.9, 0.99))
    opt_d = torch.optim.AdamW(disc.parameters(), lr=args.lr, betas=(0.9, 0.99))
    vq, disc, opt, opt_d, loader = accelerator.prepare(vq, disc, opt, opt_d, image_loader())

    global_step = 0
    while global_step < args.max_train_steps:
        for pixels in loader:
            recon, commit = vq(pixels)
            loss = F.mse_loss(recon.float(), pixels) + commit.float()
            loss = loss - args.disc_weight * disc(recon).float().mean()
            opt.zero_grad(set_to_none=True)
            accelerator.backward(loss)
            if args.max_grad_norm is not None:
                accelerator.clip_grad_norm_(vq.parameters(), args.max_grad_norm)
            opt.step()

            with torch.no_grad():
                recon, _ = vq(pixels)
            real, fake = disc(pixels).float(), disc(recon).float()
            d_loss = F.relu(1 - real).mean() + F.relu(1 + fake).mean()
            # also drops what the generator's loss has left in the discriminator
            opt_d.zero_grad(set_to_none=True)
            accelerator.backward(d_loss)
            if args.max_grad_norm is not None:
                accelerator.clip_grad_norm_(disc.parameters(), args.max_grad_norm)
            opt_d.step()

            global_step += 1
            if global_step % 50 == 0:
                accelerator.print(f"{global_step}: loss {loss.item():.4f} disc {d_loss.item():.4f}")
            if global_step % args.checkpoint_every == 0:
                accelerator.save_state(f"ckpt-{global_step}")


if __name__ == "__main__":
    main()
