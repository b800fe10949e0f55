# why correct: the input gradient is taken of the scaled score and multiplied by 1/scale before the penalty is formed, then the total loss is scaled once
import torch
import torch.nn as nn
import torch.nn.functional as F


class Energy(nn.Module):
    def __init__(self, dim=32, width=512):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, width), nn.Softplus(), nn.Linear(width, width), nn.Softplus(), nn.Linear(width, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)


class R1Trainer:
    def __init__(self, gamma=2.0, lazy=8):
        self.gamma, self.lazy = gamma, lazy
        self.e = Energy().cuda()
        self.g = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 32)).cuda()
        self.oe = torch.optim.Adam(self.e.parameters(), 2e-4, betas=(0.0, 0.99))
        self.og = torch.optim.Adam(self.g.parameters(), 2e-4, betas=(0.0, 0.99))
        self.se = torch.amp.GradScaler("cuda")
        self.sg = torch.amp.GradScaler("cuda")

    def cast(self):
        return torch.autocast("cuda", dtype=torch.float16)

    def r1(self, real):
        real = real.detach().requires_grad_(True)
        with self.cast():
            score = self.e(real).sum()
        scaled = torch.autograd.grad(self.se.scale(score), real, create_graph=True)[0]
        grad = scaled * (1.0 / self.se.get_scale())
        with self.cast():
            return grad.float().square().sum(1).mean()

    def energy_step(self, real, it):
        with torch.no_grad(), self.cast():
            fake = self.g(torch.randn(len(real), 16, device=real.device))
        self.oe.zero_grad()
        with self.cast():
            loss = F.softplus(-self.e(real)).mean() + F.softplus(self.e(fake.float())).mean()
        if it % self.lazy == 0:
            loss = loss + 0.5 * self.gamma * self.lazy * self.r1(real)
        self.se.scale(loss).backward()
        self.se.step(self.oe)
        self.se.update()
        return loss.item()

    def generator_step(self, n):
        self.og.zero_grad()
        with self.cast():
            loss = F.softplus(-self.e(self.g(torch.randn(n, 16, device="cuda")))).mean()
        self.sg.scale(loss).backward()
        self.sg.step(self.og)
        self.sg.update()
        return loss.item()

    def run(self, stream):
        for it, real in enumerate(stream):
            real = real.cuda()
            e = self.energy_step(real, it)
            g = self.generator_step(len(real))
            if it % 500 == 0:
                print(it, e, g, self.se.get_scale(), self.sg.get_scale())


if __name__ == "__main__":
    from particles import stream

    R1Trainer().run(stream(batch=1024))
