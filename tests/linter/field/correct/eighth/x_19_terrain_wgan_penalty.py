# why correct: the gradient of the penalty is taken of the scaled score and divided by the scale in float32 before its norm is formed
import torch
from torch import nn
from torch.amp import GradScaler, autocast


class Terrain(nn.Module):
    def __init__(self, z=128, w=48):
        super().__init__()
        self.first = nn.Linear(z, 8 * w * 16)
        chans = [8 * w, 4 * w, 2 * w, w]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in zip(chans, chans[1:] + [w])
        )
        self.last = nn.Conv2d(w, 1, 3, padding=1)

    def forward(self, z):
        h = self.first(z).view(z.size(0), -1, 4, 4)
        for b in self.blocks:
            h = b(h)
        return self.last(h)


class Critic(nn.Module):
    def __init__(self, w=48):
        super().__init__()
        layers, c = [], 1
        for m in (1, 2, 4, 8):
            layers += [nn.Conv2d(c, m * w, 5, 2, 2), nn.LeakyReLU(0.2)]
            c = m * w
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(c * 16, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


class Trainer:
    def __init__(self, lam=10.0, critic_steps=5, lr=1e-4):
        self.g, self.c = Terrain().cuda(), Critic().cuda()
        self.opt_g = torch.optim.Adam(self.g.parameters(), lr, betas=(0.0, 0.9))
        self.opt_c = torch.optim.Adam(self.c.parameters(), lr, betas=(0.0, 0.9))
        self.scaler_g, self.scaler_c = GradScaler("cuda"), GradScaler("cuda")
        self.lam, self.critic_steps = lam, critic_steps

    def sample(self, n):
        return self.g(torch.randn(n, 128, device="cuda"))

    def penalty(self, real, fake):
        mix = torch.rand(real.size(0), 1, 1, 1, device=real.device)
        between = (mix * real + (1 - mix) * fake).requires_grad_(True)
        with autocast("cuda", dtype=torch.float16):
            score = self.c(between)
        scaled = torch.autograd.grad(self.scaler_c.scale(score.float().sum()), between, create_graph=True)[0]
        slope = scaled.float() * (1.0 / self.scaler_c.get_scale())
        return (slope.flatten(1).norm(dim=1) - 1).square().mean()

    def critic_step(self, real):
        with torch.no_grad(), autocast("cuda", dtype=torch.float16):
            fake = self.sample(real.size(0))
        fake = fake.float()
        with autocast("cuda", dtype=torch.float16):
            gap = self.c(fake).float().mean() - self.c(real).float().mean()
        loss = gap + self.lam * self.penalty(real, fake)
        self.opt_c.zero_grad(set_to_none=True)
        self.scaler_c.scale(loss).backward()
        self.scaler_c.step(self.opt_c)
        self.scaler_c.update()
        return -gap.item()

    def generator_step(self, n):
        with autocast("cuda", dtype=torch.float16):
            loss = -self.c(self.sample(n)).mean()
        self.opt_g.zero_grad(set_to_none=True)
        self.scaler_g.scale(loss).backward()
        self.scaler_g.step(self.opt_g)
        self.scaler_g.update()

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            for i, real in enumerate(loader):
                distance = self.critic_step(real.cuda(non_blocking=True).float())
                if (i + 1) % self.critic_steps == 0:
                    self.generator_step(real.size(0))
            print(f"epoch {epoch}: distance {distance:.3f}")
        return self.g
