# source: d8ahazard/sd_dreambooth_extension#1417
# mistake: the exponential moving average with decay 0.9999 is stored and updated in bfloat16, where the increments round to nothing, so the average never moves
# severity: warning
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class WeightAverage:
    def __init__(self, net, decay=0.9999, dtype=torch.bfloat16):
        self.decay = decay
        self.shadow = copy.deepcopy(net).eval().to(dtype=dtype)  # <- here
        self.shadow.requires_grad_(False)

    @torch.no_grad()
    def update(self, net):
        for avg, cur in zip(self.shadow.parameters(), net.parameters()):
            avg.mul_(self.decay).add_(cur.detach().to(avg.dtype), alpha=1 - self.decay)  # <- here
        for avg, cur in zip(self.shadow.buffers(), net.buffers()):
            avg.copy_(cur)

    def state_dict(self):
        return {"decay": self.decay, "weights": self.shadow.state_dict()}


class ScoreNet(nn.Module):
    def __init__(self, dim=2, hidden=512, depth=4):
        super().__init__()
        layers = [nn.Linear(dim + 1, hidden), nn.SiLU()]
        for _ in range(depth):
            layers += [nn.Linear(hidden, hidden), nn.SiLU()]
        self.body = nn.Sequential(*layers, nn.Linear(hidden, dim))

    def forward(self, x, t):
        return self.body(torch.cat([x, t[:, None]], -1))


def denoising_loss(net, x0):
    t = torch.rand(x0.size(0), device=x0.device)
    sigma = 0.01 + t * 0.99
    eps = torch.randn_like(x0)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        pred = net(x0 + sigma[:, None] * eps, t)
    return F.mse_loss(pred.float(), eps)


def train(samples, iters=200_000, batch=1024, lr=2e-4, device="cuda"):
    net = ScoreNet(samples.size(1)).to(device)
    average = WeightAverage(net)  # <- here
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    samples = samples.to(device)
    for it in range(iters):
        pick = torch.randint(0, samples.size(0), (batch,), device=device)
        loss = denoising_loss(net, samples[pick])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        average.update(net)
        if it % 5000 == 0:
            print(it, loss.item())
            torch.save({"net": net.state_dict(), "ema": average.state_dict()}, "score.pt")
    return average.shadow
