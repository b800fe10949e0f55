import argparse

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import EMAModel, cast_training_params
from peft import LoraConfig
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="runwayml/stable-diffusion-v1-5")
    parser.add_argument("--data", default="/data/style")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--null_embed", default="null_prompt.pt")
    return parser.parse_args()


def main():
    args = parse()
    accelerator = Accelerator(
        mixed_precision="fp16",
        gradient_accumulation_steps=4,
        kwargs_handlers=[GradScalerKwargs(init_scale=2.0 ** 12, growth_interval=1000)],
    )
    vae = AutoencoderKL.from_pretrained(args.model, subfolder="vae")
    unet = UNet2DConditionModel.from_pretrained(args.model, subfolder="unet")
    noise_scheduler = DDPMScheduler.from_pretrained(args.model, subfolder="scheduler")
    vae.requires_grad_(False)
    unet.requires_grad_(False)
    vae.to(accelerator.device, dtype=torch.float32)
    unet.to(accelerator.device, dtype=torch.float16)
    unet.add_adapter(LoraConfig(r=8, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    cast_training_params(unet, dtype=torch.float32)
    params = [p for p in unet.parameters() if p.requires_grad]
    ema = EMAModel(params, decay=0.999)
    ema.to(accelerator.device)

    tf = transforms.Compose([
        transforms.Resize(512), transforms.CenterCrop(512), transforms.ToTensor(),
        transforms.Normalize([0.5] * 3, [0.5] * 3),
    ])
    loader = DataLoader(datasets.ImageFolder(args.data, tf), 4, shuffle=True, num_workers=4)
    optimizer = torch.optim.AdamW(params, lr=args.lr, weight_decay=1e-2)
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
    context = torch.load(args.null_embed).to(accelerator.device, torch.float16)

    for epoch in range(args.epochs):
        unet.train()
        for images, _ in loader:
            with accelerator.accumulate(unet):
                with torch.no_grad(), torch.autocast("cuda", enabled=False):
                    latents = vae.encode(images.float()).latent_dist.sample() * vae.config.scaling_factor
                noise = torch.randn_like(latents)
                t = torch.randint(0, noise_scheduler.config.num_train_timesteps, (latents.size(0),),
                                  device=latents.device)
                noisy = noise_scheduler.add_noise(latents, noise, t).half()
                pred = unet(noisy, t, context.expand(latents.size(0), -1, -1)).sample
                loss = nn.functional.mse_loss(pred.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(params, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
                ema.step(params)
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        ema.copy_to(params)
        accelerator.unwrap_model(unet).save_lora_adapter("lora_out")


if __name__ == "__main__":
    main()
