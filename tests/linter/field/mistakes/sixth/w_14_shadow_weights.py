# source: d8ahazard/sd_dreambooth_extension pull request #1415
# mistake: the moving average of the weights is held in bfloat16 with decay 0.9999, so nearly all its updates round to nothing and the average stays at the initial weights
# severity: error
import copy
import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader


class Shadow:
    """Moving average of a network's weights, used for sampling."""

    def __init__(self, net: nn.Module, decay=0.9999, store=torch.bfloat16):  # <- here
        self.decay = decay
        self.net = copy.deepcopy(net).to(dtype=store)  # <- here
        self.net.eval().requires_grad_(False)

    @torch.no_grad()
    def absorb(self, net: nn.Module):
        for mine, theirs in zip(self.net.parameters(), net.parameters()):
            mine.lerp_(theirs.detach().to(mine.dtype), 1.0 - self.decay)  # <- here
        for mine, theirs in zip(self.net.buffers(), net.buffers()):
            mine.copy_(theirs)

    def state_dict(self):
        return self.net.state_dict()

    def load_state_dict(self, sd):
        self.net.load_state_dict(sd)


class ResBlock(nn.Module):
    def __init__(self, c, emb):
        super().__init__()
        self.a = nn.Sequential(nn.GroupNorm(8, c), nn.SiLU(), nn.Conv2d(c, c, 3, padding=1))
        self.e = nn.Linear(emb, c)
        self.b = nn.Sequential(nn.GroupNorm(8, c), nn.SiLU(), nn.Conv2d(c, c, 3, padding=1))

    def forward(self, x, e):
        return x + self.b(self.a(x) + self.e(e)[:, :, None, None])


class Velocity(nn.Module):
    def __init__(self, c=128, depth=12, emb=256):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.blocks = nn.ModuleList(ResBlock(c, emb) for _ in range(depth))
        self.tail = nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, x, t):
        e = self.time(t[:, None])
        h = self.stem(x)
        for blk in self.blocks:
            h = blk(h, e)
        return self.tail(h)


def flow_loss(net, x1):
    x0 = torch.randn_like(x1)
    t = torch.rand(x1.size(0), device=x1.device)
    xt = torch.lerp(x0, x1, t[:, None, None, None])
    with torch.autocast("cuda", torch.bfloat16):
        v = net(xt, t)
    return (v.float() - (x1 - x0)).square().mean()


@torch.inference_mode()
def draw(net, n, size=64, steps=50):
    dtype = next(net.parameters()).dtype
    x = torch.randn(n, 3, size, size, device="cuda")
    for i in range(steps):
        t = torch.full((n,), i / steps, device="cuda")
        x = x + net(x.to(dtype), t.to(dtype)).float() / steps
    return x.clamp(-1, 1)


def train(dataset, total=400_000, lr=1e-4, every=10_000):
    net = Velocity().cuda()
    shadow = Shadow(net)  # <- here
    opt = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.0)
    stream = itertools.chain.from_iterable(
        itertools.repeat(DataLoader(dataset, 128, shuffle=True, num_workers=8, drop_last=True)))
    for it, img in zip(range(1, total + 1), stream):
        loss = flow_loss(net, img.cuda(non_blocking=True))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        shadow.absorb(net)  # <- here
        if it % every == 0:
            torch.save({"net": net.state_dict(), "shadow": shadow.state_dict(),
                        "opt": opt.state_dict(), "it": it}, f"flow_{it}.pt")
            torch.save(draw(shadow.net, 16).cpu(), f"samples_{it}.pt")
