# why correct: the no_grad estimate is made in its own autocast region, left before the pass with gradients, so no weight cast without gradient is reused
import torch
import torch.nn as nn
import torch.nn.functional as F


class SeqDenoiser(nn.Module):
    def __init__(self, dim=64, width=512, depth=4):
        super().__init__()
        self.inp = nn.Linear(2 * dim + 1, width)
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 8, 2048, batch_first=True), depth)
        self.out = nn.Linear(width, dim)

    def forward(self, x, t, guess):
        tt = t[:, None, None].expand(-1, x.size(1), 1)
        return self.out(self.enc(self.inp(torch.cat([x, guess, tt], -1))))


class AnalogBits:
    def __init__(self, net, p_self=0.5, dtype=torch.float16):
        self.net, self.p_self, self.dtype = net, p_self, dtype

    def cast(self):
        return torch.autocast("cuda", dtype=self.dtype)

    def loss(self, x0):
        t = torch.rand(x0.size(0), device=x0.device)
        gamma = torch.cos(t * torch.pi / 2).pow(2)[:, None, None]
        xt = gamma.sqrt() * x0 + (1 - gamma).sqrt() * torch.randn_like(x0)
        guess = torch.zeros_like(x0)
        if torch.rand(()) < self.p_self:
            with torch.no_grad(), self.cast():
                guess = self.net(xt, t, guess).float()
        with self.cast():
            pred = self.net(xt, t, guess)
        return F.mse_loss(pred.float(), x0)

    @torch.no_grad()
    def sample(self, n, length, dim, steps=100):
        self.net.eval()
        x = torch.randn(n, length, dim, device="cuda")
        guess = torch.zeros_like(x)
        with self.cast():
            for i in range(steps):
                now = torch.full((n,), 1 - i / steps, device="cuda")
                nxt = torch.full((n,), max(1 - (i + 1) / steps, 0.0), device="cuda")
                guess = self.net(x, now, guess).float().clamp(-1, 1)
                g0 = torch.cos(now * torch.pi / 2).pow(2)[:, None, None]
                g1 = torch.cos(nxt * torch.pi / 2).pow(2)[:, None, None]
                eps = (x - g0.sqrt() * guess) / (1 - g0).sqrt().clamp(min=1e-4)
                x = g1.sqrt() * guess + (1 - g1).sqrt() * eps
        self.net.train()
        return guess


def train(loader, dim, iters=100_000):
    net = SeqDenoiser(dim).cuda()
    task = AnalogBits(net)
    opt = torch.optim.Adam(net.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for it, x0 in zip(range(iters), loader):
        loss = task.loss(x0.cuda())
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if it % 1000 == 0:
            print(it, loss.item())
            print(task.sample(4, x0.size(1), dim).sign()[0, :4])
