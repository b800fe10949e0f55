# source: harubaru/waifu-diffusion#64
# mistake: under Accelerate with mixed_precision="fp16" the gradients are clipped with torch's function, while they are still multiplied by Accelerate's loss scale
# severity: error
import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from transformers import CLIPTextModel


def cli():
    p = argparse.ArgumentParser()
    p.add_argument("--base", required=True)
    p.add_argument("--lr", type=float, default=5e-6)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--max-norm", type=float, default=1.0)
    p.add_argument("--epochs", type=int, default=1)
    return p.parse_args()


def load_parts(base):
    vae = AutoencoderKL.from_pretrained(base, subfolder="vae")
    text = CLIPTextModel.from_pretrained(base, subfolder="text_encoder")
    unet = UNet2DConditionModel.from_pretrained(base, subfolder="unet")
    for m in (vae, text):
        m.requires_grad_(False)
    return vae, text, unet


def train(args, make_loader):
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=args.accum)
    vae, text, unet = load_parts(args.base)
    noise_sched = DDPMScheduler.from_pretrained(args.base, subfolder="scheduler")
    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.lr, weight_decay=1e-2)
    loader = make_loader()
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
    vae.to(accelerator.device, dtype=torch.float16)
    text.to(accelerator.device, dtype=torch.float16)

    for epoch in range(args.epochs):
        unet.train()
        for batch in loader:
            with accelerator.accumulate(unet):
                with torch.no_grad():
                    z = vae.encode(batch["pixels"].half()).latent_dist.sample() * 0.18215
                    cond = text(batch["ids"])[0]
                z = z.float()
                noise = torch.randn_like(z)
                t = torch.randint(0, noise_sched.config.num_train_timesteps, (z.size(0),), device=z.device)
                noisy = noise_sched.add_noise(z, noise, t)
                pred = unet(noisy, t, cond).sample
                loss = F.mse_loss(pred.float(), noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    torch.nn.utils.clip_grad_norm_(unet.parameters(), args.max_norm)  # <- here
                optimizer.step()
                optimizer.zero_grad()
            accelerator.print(epoch, loss.detach().item())
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(unet).save_pretrained("out/unet")


if __name__ == "__main__":
    from my_data import latents_loader

    train(cli(), latents_loader)
