# source: d8ahazard/sd_dreambooth_extension PR #1415 (merged as #1417)
# mistake: the exponential moving average is kept in bfloat16 with decay 0.9999; increments are below the format's resolution and round away, so the average never moves
# severity: error
import torch
from torch import nn


class MovingAverage:
    def __init__(self, module: nn.Module, decay: float = 0.9999, dtype: torch.dtype = torch.float32):
        self.decay = decay
        self.copy = {
            n: p.detach().to(dtype).clone() for n, p in module.named_parameters() if p.requires_grad  # <- here
        }

    @torch.no_grad()
    def track(self, module: nn.Module):
        for n, p in module.named_parameters():
            if n in self.copy:
                mean = self.copy[n]
                mean.mul_(self.decay).add_(p.to(mean.dtype), alpha=1.0 - self.decay)  # <- here

    def state_dict(self):
        return {"decay": self.decay, "copy": self.copy}

    @torch.no_grad()
    def write_to(self, module: nn.Module):
        for n, p in module.named_parameters():
            if n in self.copy:
                p.copy_(self.copy[n])


class Denoiser(nn.Module):
    def __init__(self, latent=16, width=768, depth=10):
        super().__init__()
        self.inp = nn.Linear(latent, width)
        self.t = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.body = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 12, 4 * width, batch_first=True, norm_first=True), depth
        )
        self.out = nn.Linear(width, latent)

    def forward(self, z, t):
        return self.out(self.body(self.inp(z) + self.t(t)[:, None]))


def flow_loss(net, clean):
    noise = torch.randn_like(clean)
    t = torch.rand(clean.size(0), 1, device=clean.device)
    mixed = (1 - t[..., None]) * clean + t[..., None] * noise
    with torch.autocast("cuda", dtype=torch.bfloat16):
        guess = net(mixed, t)
    return (guess.float() - (noise - clean)).square().mean()


def train(latents, steps=400_000, out="denoiser.pt"):
    net = Denoiser().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.0)
    average = MovingAverage(net, decay=0.9999, dtype=torch.bfloat16)  # <- here
    for step, clean in zip(range(steps), latents):
        loss = flow_loss(net, clean.cuda(non_blocking=True))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        average.track(net)
        if step % 5000 == 0:
            print(step, loss.item())
            torch.save(
                {"net": net.state_dict(), "opt": opt.state_dict(), "average": average.state_dict(), "step": step}, out
            )
    average.write_to(net)
    return net
