"""
# source: https://github.com/d8ahazard/sd_dreambooth_extension/pull/1417
# mistake: the moving average is stored in float16; with decay 0.9999 each update is smaller than half a float16 step and rounds away, so the average never moves.
# severity: error
# torch: any
"""
import copy
from typing import Iterable

import torch
import torch.nn.functional as F
from accelerate import Accelerator


class EMAModel:
    def __init__(self, module: torch.nn.Module, decay: float = 0.9999, dtype=torch.float32, device="cpu"):
        self.averaged = copy.deepcopy(module).eval().requires_grad_(False)
        self.averaged.to(device, dtype=dtype)
        self.decay = decay
        self.steps = 0

    @torch.no_grad()
    def step(self, params: Iterable[torch.nn.Parameter]):
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        for avg, p in zip(self.averaged.parameters(), params):
            avg.sub_((1 - decay) * (avg - p.detach().to(avg.dtype)))

    def save(self, path):
        torch.save(self.averaged.state_dict(), path)


def main(args, unet, noise_scheduler, loader):
    accelerator = Accelerator(mixed_precision="fp16")
    weight_dtype = torch.float16

    ema_unet = None
    if args.use_ema:
        ema_unet = EMAModel(unet, device=accelerator.device, dtype=weight_dtype)  # <- here

    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.learning_rate)
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)

    for epoch in range(args.num_train_epochs):
        unet.train()
        for latents, context in loader:
            noise = torch.randn_like(latents)
            steps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (latents.shape[0],)).to(latents.device)
            noisy = noise_scheduler.add_noise(latents, noise, steps)
            pred = unet(noisy, steps, context).sample
            loss = F.mse_loss(pred.float(), noise.float())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(unet.parameters(), args.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if ema_unet is not None and not accelerator.optimizer_step_was_skipped:
                ema_unet.step(accelerator.unwrap_model(unet).parameters())
        accelerator.print(epoch, loss.item())
    if ema_unet is not None:
        ema_unet.save(args.ema_path)
