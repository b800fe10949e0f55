# why correct: only the frozen backbone stays in float16, the trainable adapter weights are turned back to float32 before the optimizer sees them
import logging

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig
from transformers import CLIPTextModel

from styles.dataset import style_loader

log = logging.getLogger(__name__)
BASE = "stable-diffusion-v1-5/stable-diffusion-v1-5"


def upcast_trainable(module, dtype=torch.float32):
    count = 0
    for p in module.parameters():
        if p.requires_grad:
            p.data = p.data.to(dtype)
            count += p.numel()
    return count


def load_frozen(device, dtype):
    text = CLIPTextModel.from_pretrained(BASE, subfolder="text_encoder").requires_grad_(False).to(device, dtype)
    vae = AutoencoderKL.from_pretrained(BASE, subfolder="vae").requires_grad_(False).to(device, torch.float32)
    unet = UNet2DConditionModel.from_pretrained(BASE, subfolder="unet").requires_grad_(False)
    unet.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    unet.to(device, dtype=dtype)
    return text, vae, unet


def main(folder, steps=3000, accum=2, lr=1e-4):
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=accum)
    dtype = torch.float16
    text, vae, unet = load_frozen(accelerator.device, dtype)
    log.info("%d trainable values", upcast_trainable(unet))
    params = [p for p in unet.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=lr)
    noise_plan = DDPMScheduler.from_pretrained(BASE, subfolder="scheduler")
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, style_loader(folder, 4))

    done = 0
    while done < steps:
        for pixels, ids in loader:
            with accelerator.accumulate(unet):
                with torch.no_grad():
                    latents = vae.encode(pixels.float()).latent_dist.sample() * vae.config.scaling_factor
                    context = text(ids)[0]
                noise = torch.randn_like(latents)
                t = torch.randint(0, noise_plan.config.num_train_timesteps, (len(latents),), device=latents.device)
                noisy = noise_plan.add_noise(latents, noise, t)
                pred = unet(noisy.to(dtype), t, context).sample
                loss = F.mse_loss(pred.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(params, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                if done % 50 == 0:
                    accelerator.print(done, loss.item())
            if done >= steps:
                break

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        state = {n: p.detach().cpu() for n, p in accelerator.unwrap_model(unet).named_parameters() if p.requires_grad}
        torch.save(state, "style_adapter.pt")


if __name__ == "__main__":
    main("styles/ukiyoe")
