# source: d8ahazard/sd_dreambooth_extension PR #1417 https://github.com/d8ahazard/sd_dreambooth_extension/pull/1417
# mistake: the shadow (EMA) weights are kept in bfloat16, whose steps are coarser than (1-decay) updates, so the average hardly ever moves
# severity: warning
import copy

import torch
from torch import nn


class Shadow:
    def __init__(self, net: nn.Module, decay=0.9995, dtype=torch.bfloat16):  # <- here
        self.decay = decay
        self.net = copy.deepcopy(net).eval().to(dtype)  # <- here
        self.net.requires_grad_(False)

    @torch.no_grad()
    def absorb(self, live: nn.Module):
        for s, p in zip(self.net.parameters(), live.parameters()):
            s.mul_(self.decay).add_(p.to(s.dtype), alpha=1 - self.decay)  # <- here
        for s, b in zip(self.net.buffers(), live.buffers()):
            s.copy_(b)


class TinyUNet(nn.Module):
    def __init__(self, c=64):
        super().__init__()
        self.a = nn.Conv2d(3, c, 3, padding=1)
        self.b = nn.Conv2d(c, 2 * c, 4, 2, 1)
        self.c = nn.ConvTranspose2d(2 * c, c, 4, 2, 1)
        self.d = nn.Conv2d(2 * c, 3, 3, padding=1)

    def forward(self, x):
        h = torch.relu(self.a(x))
        u = torch.relu(self.c(torch.relu(self.b(h))))
        return self.d(torch.cat([h, u], 1))


def corrupt(x, sigma):
    return x + sigma.view(-1, 1, 1, 1) * torch.randn_like(x)


def train(loader, iterations=200_000):
    net = TinyUNet().cuda()
    shadow = Shadow(net)  # <- here
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
    it = 0
    while it < iterations:
        for x in loader:
            x = x.cuda()
            sigma = torch.rand(len(x), device=x.device)
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = net(corrupt(x, sigma))
            loss = (out.float() - x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            shadow.absorb(net)
            it += 1
            if it % 5000 == 0:
                torch.save({"net": net.state_dict(), "ema": shadow.net.state_dict(), "it": it}, f"ck_{it}.pt")
            if it >= iterations:
                return


if __name__ == "__main__":
    from faces import loader

    train(loader(64))
