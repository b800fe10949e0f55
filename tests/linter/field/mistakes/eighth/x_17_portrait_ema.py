# source: d8ahazard/sd_dreambooth_extension PR #1417
# mistake: the moving average is kept in bfloat16, where an increment of 1e-4 of the difference is rounded away, so it hardly ever moves
# severity: error
import copy

import torch
import torch.nn.functional as F
from torch import nn


class ShadowWeights:
    """Exponential moving average of a network, used for sampling."""

    def __init__(self, source: nn.Module, decay: float = 0.9999, dtype: torch.dtype = torch.bfloat16):  # <- here
        self.decay = decay
        self.module = copy.deepcopy(source).to(dtype=dtype).eval()  # <- here
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def absorb(self, source: nn.Module):
        for mine, theirs in zip(self.module.parameters(), source.parameters()):
            mine.mul_(self.decay).add_(theirs.detach().to(mine.dtype), alpha=1 - self.decay)  # <- here
        for mine, theirs in zip(self.module.buffers(), source.buffers()):
            mine.copy_(theirs)


class PortraitTuner:
    def __init__(self, unet, text_encoder, vae, schedule, lr=2e-6, device="cuda"):
        self.device = device
        self.unet = unet.to(device)
        self.text = text_encoder.to(device, torch.bfloat16).eval().requires_grad_(False)
        self.vae = vae.to(device).eval().requires_grad_(False)
        self.schedule = schedule
        self.optimizer = torch.optim.AdamW(self.unet.parameters(), lr=lr, weight_decay=1e-2)
        self.shadow = ShadowWeights(self.unet)  # <- here

    @torch.no_grad()
    def encode(self, pixels, ids):
        latents = self.vae.encode(pixels.to(self.device)).latent_dist.sample() * 0.18215
        context = self.text(ids.to(self.device))[0]
        return latents, context

    def loss(self, pixels, ids):
        latents, context = self.encode(pixels, ids)
        noise = torch.randn_like(latents)
        t = torch.randint(0, self.schedule.config.num_train_timesteps, (latents.size(0),), device=self.device)
        noisy = self.schedule.add_noise(latents, noise, t)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            pred = self.unet(noisy, t, context).sample
        return F.mse_loss(pred.float(), noise.float())

    def run(self, loader, steps):
        self.unet.train()
        done = 0
        while done < steps:
            for pixels, ids in loader:
                loss = self.loss(pixels, ids)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(self.unet.parameters(), 1.0)
                self.optimizer.step()
                self.shadow.absorb(self.unet)
                done += 1
                if done % 50 == 0:
                    print(done, float(loss))
                if done >= steps:
                    break
        return self.shadow.module
