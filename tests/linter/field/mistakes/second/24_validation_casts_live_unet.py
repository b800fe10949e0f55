"""
# source: https://github.com/huggingface/diffusers/pull/13895
# mistake: validation builds its pipeline around the live unet and moves it to float16, so the LoRA weights become float16 and the next step raises "Attempting to unscale FP16 gradients".
# severity: error
# torch: any (diffusers, accelerate, fp16)
"""
import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, DiffusionPipeline, UNet2DConditionModel
from diffusers.training_utils import cast_training_params
from peft import LoraConfig
from transformers import CLIPTextModel

from instance_data import instance_loader


def log_validation(pipeline, args, accelerator, torch_dtype):
    pipeline = pipeline.to(accelerator.device, dtype=torch_dtype)  # <- here
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator(device=accelerator.device).manual_seed(args.seed)
    images = [pipeline(args.validation_prompt, generator=generator).images[0] for _ in range(4)]
    for i, image in enumerate(images):
        image.save(f"{args.output_dir}/val_{i}.png")


def main(args):
    accelerator = Accelerator(mixed_precision="fp16")
    weight_dtype = torch.float16
    scheduler = DDPMScheduler.from_pretrained(args.model, subfolder="scheduler")
    text_encoder = CLIPTextModel.from_pretrained(args.model, subfolder="text_encoder")
    vae = AutoencoderKL.from_pretrained(args.model, subfolder="vae")
    unet = UNet2DConditionModel.from_pretrained(args.model, subfolder="unet")
    for frozen in (text_encoder, vae, unet):
        frozen.requires_grad_(False)
        frozen.to(accelerator.device, dtype=weight_dtype)

    unet.add_adapter(LoraConfig(r=8, lora_alpha=8, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    cast_training_params([unet], dtype=torch.float32)
    lora_params = [p for p in unet.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(lora_params, lr=args.lr)
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, instance_loader(args))

    for epoch in range(args.epochs):
        unet.train()
        for pixels, ids in loader:
            latents = vae.encode(pixels.to(weight_dtype)).latent_dist.sample() * vae.config.scaling_factor
            noise = torch.randn_like(latents)
            t = torch.randint(0, scheduler.config.num_train_timesteps, (latents.shape[0],), device=latents.device)
            pred = unet(scheduler.add_noise(latents, noise, t), t, text_encoder(ids)[0]).sample
            loss = F.mse_loss(pred.float(), noise.float())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(lora_params, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if epoch % args.validation_epochs == 0:
            pipeline = DiffusionPipeline.from_pretrained(
                args.model, unet=accelerator.unwrap_model(unet), text_encoder=text_encoder, torch_dtype=weight_dtype
            )
            log_validation(pipeline, args, accelerator, weight_dtype)
            del pipeline


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="stable-diffusion-v1-5")
    parser.add_argument("--validation_prompt", default="a photo of sks dog")
    parser.add_argument("--validation_epochs", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", default="out")
    main(parser.parse_args())
