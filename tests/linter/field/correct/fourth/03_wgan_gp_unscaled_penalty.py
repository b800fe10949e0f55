import os
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from spectro import MelCrops


@dataclass
class HP:
    data: str = "data/mels.pt"
    run: str = "runs/melgan-gp"
    z: int = 64
    lr: float = 1e-4
    gp: float = 10.0
    n_critic: int = 4
    batch: int = 64
    steps: int = 200_000


class Gen(nn.Module):
    def __init__(self, z, mels=80, c=512):
        super().__init__()
        self.inp = nn.Linear(z, c * 8)
        self.ups = nn.ModuleList(nn.ConvTranspose1d(c // 2**i, c // 2 ** (i + 1), 4, 2, 1) for i in range(3))
        self.out = nn.Conv1d(c // 8, mels, 7, padding=3)

    def forward(self, z):
        h = self.inp(z).unflatten(1, (-1, 8))
        for up in self.ups:
            h = nn.functional.leaky_relu(up(h), 0.2)
        return self.out(h)


class Critic(nn.Module):
    def __init__(self, mels=80, c=128):
        super().__init__()
        chans = [mels, c, 2 * c, 4 * c]
        self.convs = nn.ModuleList(nn.Conv1d(a, b, 5, 2, 2) for a, b in zip(chans, chans[1:]))
        self.out = nn.Linear(4 * c, 1)

    def forward(self, x):
        for conv in self.convs:
            x = nn.functional.leaky_relu(conv(x), 0.2)
        return self.out(x.mean(-1)).squeeze(-1)


class Trainer:
    def __init__(self, hp, device="cuda"):
        self.hp, self.device, self.step = hp, device, 0
        self.gen, self.critic = Gen(hp.z).to(device), Critic().to(device)
        self.opt_g = torch.optim.Adam(self.gen.parameters(), hp.lr, betas=(0.0, 0.9))
        self.opt_c = torch.optim.Adam(self.critic.parameters(), hp.lr, betas=(0.0, 0.9))
        self.scaler = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=500)

    def parts(self):
        return {n: getattr(self, n) for n in ("gen", "critic", "opt_g", "opt_c", "scaler")}

    def save(self):
        state = {n: p.state_dict() for n, p in self.parts().items()}
        torch.save({**state, "step": self.step}, f"{self.hp.run}/last.pt")

    def resume(self):
        ckpt = torch.load(f"{self.hp.run}/last.pt", map_location=self.device, weights_only=True)
        for n, p in self.parts().items():
            p.load_state_dict(ckpt[n])
        self.step = ckpt["step"]

    def penalty(self, real, fake):
        a = torch.rand(real.size(0), 1, 1, device=real.device)
        x = torch.lerp(fake, real, a).requires_grad_(True)
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.critic(x)
        grad = torch.autograd.grad(self.scaler.scale(out.float().sum()), x, create_graph=True)[0] / self.scaler.get_scale()
        return (grad.flatten(1).norm(dim=1) - 1).square().mean()

    def apply(self, loss, opt):
        opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(opt)
        self.scaler.update()

    def train_step(self, real):
        z = torch.randn(real.size(0), self.hp.z, device=self.device)
        with torch.autocast("cuda", dtype=torch.float16):
            fake = self.gen(z).detach()
            wdist = self.critic(real).float().mean() - self.critic(fake).float().mean()
        self.apply(self.hp.gp * self.penalty(real, fake.float()) - wdist, self.opt_c)
        if self.step % self.hp.n_critic == 0:
            with torch.autocast("cuda", dtype=torch.float16):
                loss_g = -self.critic(self.gen(z)).float().mean()
            self.apply(loss_g, self.opt_g)
        self.step += 1
        return wdist.item()


if __name__ == "__main__":
    t = Trainer(HP())
    os.makedirs(t.hp.run, exist_ok=True)
    if os.path.exists(f"{t.hp.run}/last.pt"):
        t.resume()
    loader = DataLoader(MelCrops(t.hp.data, frames=64), t.hp.batch, shuffle=True, num_workers=4, drop_last=True)
    while t.step < t.hp.steps:
        for mel in loader:
            w = t.train_step(mel.to(t.device))
            if t.step % 2000 == 0:
                print(f"{t.step} w {w:.3f} scale {t.scaler.get_scale():.0f}")
                t.save()
