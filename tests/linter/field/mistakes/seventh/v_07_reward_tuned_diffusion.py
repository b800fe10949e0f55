# source: yk7333/d3po issue #6 https://github.com/yk7333/d3po/issues/6
# mistake: the trained network itself is cast to float16 along with the frozen ones, so Accelerate's scaler fails with "Attempting to unscale FP16 gradients"
# severity: error
import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from transformers import CLIPTextModel

from prompts import preference_loader


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--base", default="stabilityai/stable-diffusion-2-1")
    p.add_argument("--lr", type=float, default=1e-5)
    p.add_argument("--steps", type=int, default=5000)
    return p.parse_args()


def main():
    args = parse()
    set_seed(7)
    acc = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
    vae = AutoencoderKL.from_pretrained(args.base, subfolder="vae")
    text = CLIPTextModel.from_pretrained(args.base, subfolder="text_encoder")
    unet = UNet2DConditionModel.from_pretrained(args.base, subfolder="unet")
    noise = DDPMScheduler.from_pretrained(args.base, subfolder="scheduler")
    vae.requires_grad_(False)
    text.requires_grad_(False)

    low = torch.float16
    for part in (vae, text, unet):
        part.to(acc.device, dtype=low)  # <- here

    opt = torch.optim.AdamW(unet.parameters(), lr=args.lr)  # <- here
    loader = preference_loader()
    unet, opt, loader = acc.prepare(unet, opt, loader)  # <- here

    done = 0
    unet.train()
    while done < args.steps:
        for batch in loader:
            with acc.accumulate(unet):
                with torch.no_grad():
                    z = vae.encode(batch["image"].to(low)).latent_dist.sample() * vae.config.scaling_factor
                    ctx = text(batch["ids"])[0]
                eps = torch.randn_like(z)
                t = torch.randint(0, 1000, (z.size(0),), device=z.device)
                pred = unet(noise.add_noise(z, eps, t), t, ctx).sample
                per = F.mse_loss(pred.float(), eps.float(), reduction="none").mean((1, 2, 3))
                loss = (per * batch["preference"]).mean()
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(unet.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
            if acc.sync_gradients:
                done += 1
            if done >= args.steps:
                break
    acc.wait_for_everyone()
    acc.unwrap_model(unet).save_pretrained("tuned_unet")


if __name__ == "__main__":
    main()
