# source: lucidrains/stylegan2-pytorch pull request #101 ("gradient penalty might not work, weights need to be unscaled for it")
# mistake: the R1 penalty is computed from the gradient of scaled logits without dividing by the scale, so the penalty is too large by the scale squared
# severity: error
import torch
import torch.nn.functional as F
from torch import autograd, nn
from torch.amp import GradScaler, autocast


def up(ci, co):
    return nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(ci, co, 3, padding=1),
                         nn.GroupNorm(8, co), nn.LeakyReLU(0.2))


def down(ci, co):
    return nn.Sequential(nn.Conv2d(ci, co, 4, 2, 1), nn.LeakyReLU(0.2))


class HeightMaker(nn.Module):
    def __init__(self, z=128, c=256):
        super().__init__()
        self.seed = nn.Linear(z, c * 16)
        self.net = nn.Sequential(up(c, c), up(c, 128), up(128, 64), up(64, 32), nn.Conv2d(32, 1, 1))
        self.c = c

    def forward(self, z):
        return torch.tanh(self.net(self.seed(z).view(-1, self.c, 4, 4)))


class HeightCritic(nn.Module):
    def __init__(self, c=64):
        super().__init__()
        self.net = nn.Sequential(down(1, c), down(c, 2 * c), down(2 * c, 4 * c), down(4 * c, 4 * c))
        self.out = nn.Linear(4 * c * 16, 1)

    def forward(self, x):
        return self.out(self.net(x).flatten(1)).squeeze(1)


def r1_penalty(logits, real, scaler):
    scaled, = autograd.grad(scaler.scale(logits.sum()), real, create_graph=True)  # <- here
    return scaled.float().pow(2).sum(dim=(1, 2, 3)).mean()  # <- here


class TerrainGAN:
    def __init__(self, z=128, gamma=10.0, lazy=16, device="cuda"):
        self.g = HeightMaker(z).to(device)
        self.d = HeightCritic().to(device)
        self.og = torch.optim.Adam(self.g.parameters(), lr=2e-3, betas=(0.0, 0.99))
        self.od = torch.optim.Adam(self.d.parameters(), lr=2e-3, betas=(0.0, 0.99))
        self.sg, self.sd = GradScaler("cuda"), GradScaler("cuda")
        self.z, self.gamma, self.lazy, self.device = z, gamma, lazy, device

    def noise(self, n):
        return torch.randn(n, self.z, device=self.device)

    def critic_step(self, real, step):
        regularize = step % self.lazy == 0
        real = real.detach().requires_grad_(regularize)
        with torch.no_grad(), autocast("cuda"):
            fake = self.g(self.noise(real.size(0)))
        with autocast("cuda"):
            on_real = self.d(real)
            on_fake = self.d(fake)
        loss = F.softplus(-on_real.float()).mean() + F.softplus(on_fake.float()).mean()
        if regularize:
            loss = loss + 0.5 * self.gamma * self.lazy * r1_penalty(on_real, real, self.sd)  # <- here
        self.od.zero_grad(set_to_none=True)
        self.sd.scale(loss).backward()
        self.sd.step(self.od)
        self.sd.update()
        return loss.item()

    def maker_step(self, n):
        self.d.requires_grad_(False)
        with autocast("cuda"):
            judged = self.d(self.g(self.noise(n)))
        loss = F.softplus(-judged.float()).mean()
        self.og.zero_grad(set_to_none=True)
        self.sg.scale(loss).backward()
        self.sg.step(self.og)
        self.sg.update()
        self.d.requires_grad_(True)
        return loss.item()

    def fit(self, loader, epochs):
        step = 0
        for ep in range(epochs):
            for real in loader:
                ld = self.critic_step(real.to(self.device), step)
                lg = self.maker_step(real.size(0))
                step += 1
            print(f"{ep}: D {ld:.3f} G {lg:.3f}")
            torch.save({"g": self.g.state_dict(), "d": self.d.state_dict(), "og": self.og.state_dict(),
                        "od": self.od.state_dict(), "sg": self.sg.state_dict(), "sd": self.sd.state_dict()},
                       "terrain_gan.pt")
