# source: https://github.com/lucidrains/stylegan2-pytorch/issues/100
# mistake: the gradient penalty takes the norm of gradients of a scaled output without dividing by the scale, so the penalty pushes norms of 65536 times the real gradient towards one
# severity: error
import torch
import torch.nn as nn


def mlp(sizes):
    parts = []
    for a, b in zip(sizes[:-2], sizes[1:-1]):
        parts += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*parts, nn.Linear(sizes[-2], sizes[-1]))


class TabularGAN:
    """Synthesizes insurance claims; rows are already quantile-normalized."""

    def __init__(self, columns, noise=128, lr=1e-4, lam=10.0, critic_iters=5):
        self.noise, self.lam, self.critic_iters = noise, lam, critic_iters
        self.gen = mlp([noise, 512, 512, columns]).cuda()
        self.critic = mlp([columns, 512, 512, 1]).cuda()
        self.og = torch.optim.Adam(self.gen.parameters(), lr=lr, betas=(0.0, 0.9))
        self.oc = torch.optim.Adam(self.critic.parameters(), lr=lr, betas=(0.0, 0.9))
        self.scaler = torch.amp.GradScaler("cuda")

    def sample(self, n):
        return self.gen(torch.randn(n, self.noise, device="cuda"))

    def penalty(self, real, fake):
        eps = torch.rand(real.shape[0], 1, device=real.device)
        mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
        with torch.autocast("cuda", dtype=torch.float16):
            score = self.critic(mix)
        (slope,) = torch.autograd.grad(  # <- here
            self.scaler.scale(score.float().sum()), mix, create_graph=True)  # <- here
        norm = slope.float().norm(2, dim=1)  # <- here
        return ((norm - 1) ** 2).mean()  # <- here

    def critic_step(self, real):
        self.oc.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            with torch.no_grad():
                fake = self.sample(real.shape[0])
            margin = self.critic(fake).float().mean() - self.critic(real).float().mean()
        loss = margin + self.lam * self.penalty(real, fake.float())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.oc)
        self.scaler.update()
        return -margin.detach()

    def generator_step(self, n):
        self.og.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = -self.critic(self.sample(n)).float().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.og)
        self.scaler.update()
        return loss.detach()

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            for i, (rows,) in enumerate(loader):
                w = self.critic_step(rows.cuda())
                if (i + 1) % self.critic_iters == 0:
                    self.generator_step(rows.shape[0])
            print(epoch, w.item())
