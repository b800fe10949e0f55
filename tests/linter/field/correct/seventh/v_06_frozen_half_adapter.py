# why correct: only frozen weights are float16; the trainable adapter matrices stay float32, so the scaler sees float32 gradients
import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig
from transformers import CLIPTextModel

from pairs import caption_loader


def trainable(module):
    return [p for p in module.parameters() if p.requires_grad]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--base", default="runwayml/stable-diffusion-v1-5")
    ap.add_argument("--rank", type=int, default=16)
    ap.add_argument("--steps", type=int, default=3000)
    args = ap.parse_args()

    acc = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=4)
    vae = AutoencoderKL.from_pretrained(args.base, subfolder="vae")
    text = CLIPTextModel.from_pretrained(args.base, subfolder="text_encoder")
    unet = UNet2DConditionModel.from_pretrained(args.base, subfolder="unet")
    schedule = DDPMScheduler.from_pretrained(args.base, subfolder="scheduler")
    for m in (vae, text, unet):
        m.requires_grad_(False)
        m.to(acc.device, dtype=torch.float16)

    unet.add_adapter(LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    for p in trainable(unet):
        p.data = p.data.float()

    opt = torch.optim.AdamW(trainable(unet), lr=1e-4)
    loader = caption_loader()
    unet, opt, loader = acc.prepare(unet, opt, loader)

    step = 0
    while step < args.steps:
        for batch in loader:
            with acc.accumulate(unet):
                with torch.no_grad():
                    z = vae.encode(batch["image"].half()).latent_dist.sample() * vae.config.scaling_factor
                    ctx = text(batch["ids"])[0]
                eps = torch.randn_like(z)
                t = torch.randint(0, schedule.config.num_train_timesteps, (z.size(0),), device=z.device)
                pred = unet(schedule.add_noise(z, eps, t), t, ctx).sample
                loss = F.mse_loss(pred.float(), eps.float())
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(trainable(unet), 1.0)
                opt.step()
                opt.zero_grad()
            if acc.sync_gradients:
                step += 1
                if step >= args.steps:
                    break
    acc.unwrap_model(unet).save_lora_adapter("adapter")


if __name__ == "__main__":
    main()
