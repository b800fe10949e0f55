# why correct: Accelerate divides the loss itself, scales in accelerator.backward and unscales in accelerator.clip_grad_norm_, which is called only when gradients are synchronised
import logging

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader

logger = get_logger(__name__)


def parameters_to_train(unet):
    unet.requires_grad_(False)
    chosen = []
    for name, p in unet.named_parameters():
        if "attn2" in name and ("to_k" in name or "to_v" in name):
            p.requires_grad_(True)
            chosen.append(p)
    return chosen


def main(dataset, encode_text, encode_image, out_dir, base="runwayml/stable-diffusion-v1-5",
         precision="fp16", accum=4, lr=1e-5, max_steps=2000, max_norm=1.0):
    acc = Accelerator(mixed_precision=precision, gradient_accumulation_steps=accum)
    logging.basicConfig(level=logging.INFO)

    noise_plan = DDPMScheduler.from_pretrained(base, subfolder="scheduler")
    unet = UNet2DConditionModel.from_pretrained(base, subfolder="unet")  # float32 weights
    unet.enable_gradient_checkpointing()
    trainable = parameters_to_train(unet)
    opt = torch.optim.AdamW(trainable, lr=lr, weight_decay=1e-2)
    sched = get_scheduler("constant_with_warmup", opt,
                          num_warmup_steps=100 * acc.num_processes,
                          num_training_steps=max_steps * acc.num_processes)
    loader = DataLoader(dataset, batch_size=2, shuffle=True, num_workers=4)
    unet, opt, loader, sched = acc.prepare(unet, opt, loader, sched)
    ema = EMAModel([p for p in unet.parameters() if p.requires_grad], decay=0.999)
    ema.to(acc.device)

    step = 0
    while step < max_steps:
        for batch in loader:
            with acc.accumulate(unet):
                with torch.no_grad():
                    latents = encode_image(batch["image"]).float()
                    context = encode_text(batch["prompt"])
                noise = torch.randn_like(latents)
                t = torch.randint(0, noise_plan.config.num_train_timesteps, (len(latents),), device=acc.device)
                noisy = noise_plan.add_noise(latents, noise, t)
                pred = unet(noisy, t, context).sample
                loss = F.mse_loss(pred.float(), noise)

                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(trainable, max_norm)
                opt.step()
                sched.step()
                opt.zero_grad()

            if acc.sync_gradients:
                ema.step([p for p in unet.parameters() if p.requires_grad])
                step += 1
                if step % 50 == 0:
                    logger.info(f"step {step} loss {acc.gather(loss.detach()).mean().item():.4f}")
                if step % 500 == 0:
                    acc.save_state(f"{out_dir}/step_{step}")
            if step >= max_steps:
                break

    acc.wait_for_everyone()
    if acc.is_main_process:
        acc.unwrap_model(unet).save_pretrained(out_dir)
