# source: https://github.com/d8ahazard/sd_dreambooth_extension/pull/1417
# mistake: the exponential moving average is kept and updated in bfloat16, where an increment of 1e-4 of the difference is rounded away, so the average never leaves the initial weights
# severity: error
import copy

import torch
import torch.nn.functional as F
from torch import nn


class Averager:
    def __init__(self, net, decay=0.9999, dtype=torch.bfloat16):  # <- here
        self.decay = decay
        self.net = copy.deepcopy(net).to(dtype=dtype).eval().requires_grad_(False)  # <- here

    @torch.no_grad()
    def update(self, net):
        for avg, cur in zip(self.net.parameters(), net.parameters()):
            avg.mul_(self.decay).add_(cur.to(avg.dtype), alpha=1.0 - self.decay)  # <- here
        for avg, cur in zip(self.net.buffers(), net.buffers()):
            avg.copy_(cur)

    def state_dict(self):
        return self.net.state_dict()


class Velocity(nn.Module):
    def __init__(self, c=192, depth=10):
        super().__init__()
        self.stem = nn.Conv2d(4, c, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(1, c), nn.SiLU(), nn.Linear(c, c))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(16, c), nn.SiLU(), nn.Conv2d(c, c, 3, padding=1)) for _ in range(depth))
        self.head = nn.Conv2d(c, 4, 3, padding=1)

    def forward(self, x, t):
        h = self.stem(x)
        e = self.time(t[:, None])[:, :, None, None]
        for layer in self.layers:
            h = h + layer(h + e)
        return self.head(h)


@torch.no_grad()
def sample(net, n, steps=50):
    p = next(net.parameters())
    x = torch.randn(n, 4, 32, 32, device=p.device)
    for i in range(steps):
        t = torch.full((n,), i / steps, device=p.device)
        x = x + net(x.to(p.dtype), t.to(p.dtype)).float() / steps
    return x


def train(latents, steps=400_000, lr=1e-4, log_every=1000):
    net = Velocity().cuda()
    ema = Averager(net)
    opt = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.0)
    for step, x1 in enumerate(latents):
        if step == steps:
            break
        x1 = x1.cuda(non_blocking=True)
        x0 = torch.randn_like(x1)
        t = torch.rand(len(x1), device="cuda")
        xt = torch.lerp(x0, x1, t[:, None, None, None])
        with torch.autocast("cuda", dtype=torch.bfloat16):
            v = net(xt, t)
        loss = F.mse_loss(v.float(), x1 - x0)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        ema.update(net)
        if step % log_every == 0:
            print(step, loss.item())
            torch.save(sample(ema.net, 16).cpu(), f"grid_{step:06d}.pt")
    torch.save({"net": net.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict()}, "flow.pt")
