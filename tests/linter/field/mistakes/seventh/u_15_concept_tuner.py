# source: https://github.com/d8ahazard/sd_dreambooth_extension/pull/1415
# mistake: the EMA copy is kept in bfloat16, whose 8 bits cannot hold increments of (1-0.9999), so the averaged weights hardly ever change
# severity: error
import copy

import torch
import torch.nn.functional as F
from torch import nn


class ShadowWeights:
    def __init__(self, model, decay=0.9999, weight_dtype=torch.bfloat16):  # <- here
        self.decay = decay
        self.shadow = copy.deepcopy(model).eval().to(dtype=weight_dtype)  # <- here
        self.shadow.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for avg, live in zip(self.shadow.parameters(), model.parameters()):
            avg.mul_(self.decay).add_(live.detach().to(avg.dtype), alpha=1 - self.decay)  # <- here
        for avg, live in zip(self.shadow.buffers(), model.buffers()):
            avg.copy_(live)

    def export(self, path):
        torch.save(self.shadow.state_dict(), path)


class ConceptTuner:
    def __init__(self, denoiser, text_encoder, scheduler, lr=2e-6):
        self.denoiser = denoiser.cuda()
        self.text_encoder = text_encoder.cuda().eval().requires_grad_(False)
        self.scheduler = scheduler
        self.opt = torch.optim.AdamW(self.denoiser.parameters(), lr=lr)
        self.ema = ShadowWeights(self.denoiser, weight_dtype=torch.bfloat16)  # <- here

    def step(self, latents, tokens):
        latents, tokens = latents.cuda(), tokens.cuda()
        noise = torch.randn_like(latents)
        t = torch.randint(0, self.scheduler.num_steps, (latents.size(0),), device=latents.device)
        noisy = self.scheduler.add_noise(latents, noise, t)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.no_grad():
                cond = self.text_encoder(tokens)
            pred = self.denoiser(noisy, t, cond)
        loss = F.mse_loss(pred.float(), noise)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.denoiser.parameters(), 1.0)
        self.opt.step()
        self.ema.update(self.denoiser)
        return loss.item()

    def fit(self, loader, steps):
        it = iter(loader)
        for i in range(steps):
            try:
                latents, tokens = next(it)
            except StopIteration:
                it = iter(loader)
                latents, tokens = next(it)
            value = self.step(latents, tokens)
            if i % 50 == 0:
                print(f"{i}: {value:.4f}")
        self.ema.export("concept_ema.pt")
