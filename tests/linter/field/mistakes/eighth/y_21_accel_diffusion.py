# source: https://github.com/huggingface/transformers/issues/26312
# mistake: the loss is divided by the accumulation steps by hand although accelerator.backward divides it as well, so gradients are that many times too small.
# severity: error
import argparse
import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader
from torchvision.utils import save_image

from ddpm.data import Tiles
from ddpm.schedule import Cosine
from ddpm.unet import UNet


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("folder")
    p.add_argument("--results", default="results")
    p.add_argument("--image-size", type=int, default=128)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--grad-accum", type=int, default=4)
    p.add_argument("--lr", type=float, default=8e-5)
    p.add_argument("--iterations", type=int, default=700000)
    p.add_argument("--ema-decay", type=float, default=0.995)
    p.add_argument("--every", type=int, default=1000)
    return p.parse_args()


class Average:
    def __init__(self, net, decay):
        self.net = copy.deepcopy(net).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, net):
        for mine, theirs in zip(self.net.parameters(), net.parameters()):
            mine.lerp_(theirs, 1 - self.decay)


def main():
    args = parse()
    out = Path(args.results)
    out.mkdir(exist_ok=True, parents=True)
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=args.grad_accum)  # <- here
    diffusion = Cosine(steps=1000).to(accelerator.device)
    unet = UNet(dim=64, mults=(1, 2, 4, 8))
    optimizer = torch.optim.Adam(unet.parameters(), lr=args.lr, betas=(0.9, 0.99))
    loader = DataLoader(Tiles(args.folder, args.image_size), args.batch, shuffle=True, num_workers=8, drop_last=True)
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
    average = Average(accelerator.unwrap_model(unet), args.ema_decay)

    step = 0
    while step < args.iterations:
        for image in loader:
            with accelerator.accumulate(unet):
                t = torch.randint(0, 1000, (len(image),), device=image.device)
                noise = torch.randn_like(image)
                noisy = diffusion.add_noise(image, noise, t)
                with accelerator.autocast():
                    guess = unet(noisy, t)
                loss = F.mse_loss(guess.float(), noise)
                loss = loss / args.grad_accum  # <- here
                accelerator.backward(loss)  # <- here
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            average.update(accelerator.unwrap_model(unet))
            step += 1
            if step % 50 == 0:
                accelerator.print(f"{step}: loss {loss.item() * args.grad_accum:.4f}")
            if step % args.every == 0:
                accelerator.save_state(str(out / f"state_{step // args.every}"))
                if accelerator.is_main_process:
                    samples = diffusion.sample(average.net, (16, 3, args.image_size, args.image_size))
                    save_image(samples, out / f"sample_{step // args.every}.png", nrow=4)
            if step >= args.iterations:
                break


if __name__ == "__main__":
    main()
