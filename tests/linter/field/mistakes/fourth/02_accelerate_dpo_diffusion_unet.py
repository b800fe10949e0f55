# re-expressed from github.com/yk7333/d3po issue 6: full UNet fine-tuning (no LoRA) put the trained UNet itself in float16, so the scaler refused to unscale its gradients
import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch.utils.data import DataLoader
from transformers import CLIPTextModel

from data import PreferencePairs


@dataclass
class Config:
    base: str = "runwayml/stable-diffusion-v1-5"
    data: str = "data/pairs"
    out: str = "runs/dpo-sd15"
    mixed_precision: str = "fp16"
    batch_size: int = 2
    grad_accum: int = 16
    lr: float = 1e-8 * 2048
    beta: float = 2000.0
    max_steps: int = 2000
    clip: float = 1.0
    seed: int = 7


cfg = Config()
accelerator = Accelerator(
    mixed_precision=cfg.mixed_precision,
    gradient_accumulation_steps=cfg.grad_accum,
    project_dir=cfg.out,
)
set_seed(cfg.seed)

vae = AutoencoderKL.from_pretrained(cfg.base, subfolder="vae")
text_encoder = CLIPTextModel.from_pretrained(cfg.base, subfolder="text_encoder")
unet = UNet2DConditionModel.from_pretrained(cfg.base, subfolder="unet")
noise_sched = DDPMScheduler.from_pretrained(cfg.base, subfolder="scheduler")
ref_unet = copy.deepcopy(unet)
for frozen in (vae, text_encoder, ref_unet):
    frozen.requires_grad_(False)

half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(cfg.mixed_precision, torch.float32)
vae.to(accelerator.device, dtype=half)
text_encoder.to(accelerator.device, dtype=half)
ref_unet.to(accelerator.device, dtype=half)
unet.to(accelerator.device, dtype=half)  # <- here
unet.enable_gradient_checkpointing()

optimizer = torch.optim.AdamW(unet.parameters(), lr=cfg.lr, weight_decay=1e-2)
loader = DataLoader(PreferencePairs(cfg.data), batch_size=cfg.batch_size, shuffle=True, num_workers=4)
unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)


def per_sample_mse(pred, target):
    return F.mse_loss(pred.float(), target.float(), reduction="none").mean(dim=(1, 2, 3))


step = 0
while step < cfg.max_steps:
    for batch in loader:
        with accelerator.accumulate(unet):
            with torch.no_grad():
                pixels = torch.cat([batch["preferred"], batch["rejected"]]).to(half)
                latents = vae.encode(pixels).latent_dist.sample() * vae.config.scaling_factor
                emb = text_encoder(batch["input_ids"])[0].repeat(2, 1, 1)
            n = latents.shape[0] // 2
            noise = torch.randn_like(latents[:n]).repeat(2, 1, 1, 1)
            t = torch.randint(0, noise_sched.config.num_train_timesteps, (n,), device=latents.device).repeat(2)
            noisy = noise_sched.add_noise(latents, noise, t)

            with accelerator.autocast():
                pred = unet(noisy, t, emb).sample
                with torch.no_grad():
                    ref = ref_unet(noisy, t, emb).sample

            model_w, model_l = per_sample_mse(pred, noise).chunk(2)
            ref_w, ref_l = per_sample_mse(ref, noise).chunk(2)
            margin = (model_w - model_l) - (ref_w - ref_l)
            loss = -F.logsigmoid(-0.5 * cfg.beta * margin).mean()

            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(unet.parameters(), cfg.clip)
            optimizer.step()
            optimizer.zero_grad()

        if accelerator.sync_gradients:
            step += 1
            if step % 10 == 0:
                accelerator.print(f"{step} loss {loss.item():.4f} acc {(margin < 0).float().mean().item():.3f}")
            if step >= cfg.max_steps:
                break

if accelerator.is_main_process:
    accelerator.unwrap_model(unet).save_pretrained(f"{cfg.out}/unet")
