# source: https://github.com/d8ahazard/sd_dreambooth_extension/pull/1415
# mistake: the EMA copy is kept in bfloat16, where increments of 1e-4 of a weight round to nothing, so the averaged weights hardly move
# severity: warning
import copy
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Settings:
    steps: int = 200_000
    lr: float = 1e-4
    decay: float = 0.9999
    timesteps: int = 1000


def cosine_alphas(n):
    t = torch.linspace(0, 1, n + 1, dtype=torch.float64)
    f = torch.cos((t + 0.008) / 1.008 * torch.pi / 2) ** 2
    return (f[1:] / f[0]).clamp(1e-5, 1 - 1e-5).float()


class Shadow:
    def __init__(self, net, decay):
        self.decay = decay
        self.net = copy.deepcopy(net).to(torch.bfloat16)  # <- here
        self.net.requires_grad_(False)
        self.net.eval()

    @torch.no_grad()
    def track(self, net):
        for s, p in zip(self.net.parameters(), net.parameters()):
            s.mul_(self.decay).add_(p.to(s.dtype), alpha=1 - self.decay)  # <- here
        for s, b in zip(self.net.buffers(), net.buffers()):
            s.copy_(b)


def diffusion_loss(net, x0, cond, alphas):
    t = torch.randint(0, len(alphas), (x0.shape[0],), device=x0.device)
    a = alphas[t].view(-1, 1, 1, 1)
    noise = torch.randn_like(x0)
    xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
    with torch.autocast("cuda", dtype=torch.bfloat16):
        pred = net(xt, t, cond)
    return F.mse_loss(pred.float(), noise)


def run(net: nn.Module, stream, cfg: Settings):
    net = net.cuda().train()
    shadow = Shadow(net, cfg.decay)
    alphas = cosine_alphas(cfg.timesteps).cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=cfg.lr, weight_decay=0.01)
    for step in range(cfg.steps):
        latents, cond = next(stream)
        loss = diffusion_loss(net, latents.cuda(), cond.cuda(), alphas)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        shadow.track(net)
        if step % 1000 == 0:
            print(step, loss.item())
    torch.save(shadow.net.state_dict(), "ema.pt")
