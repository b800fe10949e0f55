# source: https://github.com/lucidrains/stylegan2-pytorch/pull/101
# mistake: the gradient penalty is computed from the gradient of the scaled critic output without dividing by the scale, so "norm - 1" compares 1 with a norm thousands of times too large
# severity: error
import torch
from torch import autograd, nn
from torch.cuda.amp import GradScaler, autocast


class Critic(nn.Module):
    def __init__(self, f=64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, f, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(f, 2 * f, 4, 2, 1), nn.InstanceNorm2d(2 * f, affine=True), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * f, 4 * f, 4, 2, 1), nn.InstanceNorm2d(4 * f, affine=True), nn.LeakyReLU(0.2),
        )
        self.score = nn.Linear(4 * f, 1)

    def forward(self, x):
        return self.score(self.body(x).mean((2, 3)))


class Generator(nn.Module):
    def __init__(self, z=128, f=64):
        super().__init__()
        self.z = z
        self.lift = nn.Linear(z, 4 * f * 8 * 8)
        self.body = nn.Sequential(
            nn.ConvTranspose2d(4 * f, 2 * f, 4, 2, 1), nn.BatchNorm2d(2 * f), nn.ReLU(),
            nn.ConvTranspose2d(2 * f, f, 4, 2, 1), nn.BatchNorm2d(f), nn.ReLU(),
            nn.ConvTranspose2d(f, 1, 4, 2, 1), nn.Tanh(),
        )

    def forward(self, n, device="cuda"):
        h = self.lift(torch.randn(n, self.z, device=device))
        return self.body(h.view(n, -1, 8, 8))


class MammogramGAN:
    def __init__(self, lr=1e-4, weight=10.0, n_critic=5):
        self.G, self.C = Generator().cuda(), Critic().cuda()
        self.og = torch.optim.Adam(self.G.parameters(), lr, betas=(0.0, 0.9))
        self.oc = torch.optim.Adam(self.C.parameters(), lr, betas=(0.0, 0.9))
        self.sg, self.sc = GradScaler(), GradScaler()
        self.weight, self.n_critic = weight, n_critic

    def penalty(self, real, fake):
        u = torch.rand(len(real), 1, 1, 1, device=real.device)
        mix = (u * real + (1 - u) * fake).requires_grad_(True)
        with autocast():
            out = self.C(mix)
        grad = autograd.grad(outputs=self.sc.scale(out.float().sum()), inputs=mix, create_graph=True)[0]  # <- here
        norm = grad.float().flatten(1).norm(2, dim=1)  # <- here
        return ((norm - 1.0) ** 2).mean()  # <- here

    def critic_step(self, real):
        with torch.no_grad(), autocast():
            fake = self.G(len(real)).float()
        with autocast():
            gap = self.C(fake).float().mean() - self.C(real).float().mean()
        loss = gap + self.weight * self.penalty(real, fake)
        self.oc.zero_grad(set_to_none=True)
        self.sc.scale(loss).backward()
        self.sc.step(self.oc)
        self.sc.update()
        return -gap.item()

    def generator_step(self, n):
        with autocast():
            loss = -self.C(self.G(n)).float().mean()
        self.og.zero_grad(set_to_none=True)
        self.sg.scale(loss).backward()
        self.sg.step(self.og)
        self.sg.update()

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            for i, real in enumerate(loader):
                w = self.critic_step(real.cuda(non_blocking=True))
                if (i + 1) % self.n_critic == 0:
                    self.generator_step(len(real))
            print(f"epoch {epoch} wasserstein {w:.3f}")
