# why correct: Accelerate's own clipping is called only when gradients are synchronized, so they are unscaled once; step and schedule are wrapped and skip themselves
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig
from transformers import CLIPTextModel

BASE = "runwayml/stable-diffusion-v1-5"


def lora_parameters(unet):
    unet.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    trainable = [p for p in unet.parameters() if p.requires_grad]
    for p in trainable:
        p.data = p.data.to(torch.float32)
    return trainable


def main(dataset, out="lora", steps=2000, accum=4):
    accelerator = Accelerator(
        mixed_precision="fp16", gradient_accumulation_steps=accum,
        project_config=ProjectConfiguration(project_dir=out))
    dtype = torch.float16

    vae = AutoencoderKL.from_pretrained(BASE, subfolder="vae").requires_grad_(False)
    text = CLIPTextModel.from_pretrained(BASE, subfolder="text_encoder").requires_grad_(False)
    unet = UNet2DConditionModel.from_pretrained(BASE, subfolder="unet")
    schedule = DDPMScheduler.from_pretrained(BASE, subfolder="scheduler")
    for frozen in (vae, text, unet):
        frozen.to(accelerator.device, dtype=dtype)

    params = lora_parameters(unet)
    optimizer = torch.optim.AdamW(params, lr=1e-4, weight_decay=1e-2)
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, shuffle=True, num_workers=2)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=100)
    unet, optimizer, loader, warm = accelerator.prepare(unet, optimizer, loader, warm)

    done = 0
    unet.train()
    while done < steps:
        for batch in loader:
            with accelerator.accumulate(unet):
                with torch.no_grad():
                    latents = vae.encode(batch["pixels"].to(dtype)).latent_dist.sample() * vae.config.scaling_factor
                    hidden = text(batch["ids"])[0]
                noise = torch.randn_like(latents)
                t = torch.randint(0, schedule.config.num_train_timesteps, (latents.shape[0],), device=latents.device)
                noisy = schedule.add_noise(latents, noise, t)
                pred = unet(noisy, t, hidden).sample
                loss = F.mse_loss(pred.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(params, 1.0)
                optimizer.step()
                warm.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                if done % 500 == 0:
                    accelerator.save_state(f"{out}/state-{done}")
                if done >= steps:
                    break
    accelerator.end_training()
