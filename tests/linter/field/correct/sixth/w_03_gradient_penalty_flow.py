# why correct: the penalty's gradient is taken of a scaled output and multiplied by 1/scale in float32 before its norm is used; the whole loss is scaled once for backward
import torch
from torch import autograd
from torch.amp import GradScaler, autocast


def interpolate(a, b):
    w = torch.rand(a.size(0), *([1] * (a.ndim - 1)), device=a.device)
    return torch.lerp(a, b, w).requires_grad_(True)


def lipschitz_term(critic, a, b, scaler):
    mid = interpolate(a, b)
    with autocast("cuda"):
        score = critic(mid)
    grads, = autograd.grad(
        outputs=scaler.scale(score.float().sum()), inputs=mid, create_graph=True
    )
    grads = grads.float() * (1.0 / scaler.get_scale())
    slope = grads.flatten(1).square().sum(1).add(1e-12).sqrt()
    return (slope - 1.0).square().mean()


class WassersteinTrainer:
    """Density-ratio critic between simulated and measured showers."""

    def __init__(self, maker, critic, z=64, lam=10.0, n_critic=5):
        self.maker, self.critic = maker.cuda(), critic.cuda()
        self.z, self.lam, self.n_critic = z, lam, n_critic
        self.opt_m = torch.optim.Adam(maker.parameters(), 1e-4, betas=(0.0, 0.9))
        self.opt_c = torch.optim.Adam(critic.parameters(), 1e-4, betas=(0.0, 0.9))
        self.sc_m = GradScaler("cuda", init_scale=2.0**12)
        self.sc_c = GradScaler("cuda", init_scale=2.0**12)

    def make(self, n):
        return self.maker(torch.randn(n, self.z, device="cuda"))

    def critic_batch(self, real):
        with torch.no_grad(), autocast("cuda"):
            fake = self.make(len(real))
        fake = fake.float()
        with autocast("cuda"):
            gap = self.critic(fake).float().mean() - self.critic(real).float().mean()
        loss = gap + self.lam * lipschitz_term(self.critic, real, fake, self.sc_c)
        self.opt_c.zero_grad(set_to_none=True)
        self.sc_c.scale(loss).backward()
        self.sc_c.step(self.opt_c)
        self.sc_c.update()
        return -gap.item()

    def maker_batch(self, n):
        for p in self.critic.parameters():
            p.requires_grad_(False)
        with autocast("cuda"):
            loss = -self.critic(self.make(n)).float().mean()
        self.opt_m.zero_grad(set_to_none=True)
        self.sc_m.scale(loss).backward()
        self.sc_m.step(self.opt_m)
        self.sc_m.update()
        for p in self.critic.parameters():
            p.requires_grad_(True)

    def fit(self, loader, steps):
        it = iter(loader)
        for step in range(steps):
            for _ in range(self.n_critic):
                try:
                    real = next(it)
                except StopIteration:
                    it = iter(loader)
                    real = next(it)
                distance = self.critic_batch(real.cuda(non_blocking=True))
            self.maker_batch(len(real))
            if step % 250 == 0:
                print(f"{step}: W1 ~ {distance:.3f} scales {self.sc_c.get_scale():.0f}/{self.sc_m.get_scale():.0f}")

    def state_dict(self):
        names = ("maker", "critic", "opt_m", "opt_c", "sc_m", "sc_c")
        return {n: getattr(self, n).state_dict() for n in names}

    def load_state_dict(self, sd):
        for n, part in sd.items():
            getattr(self, n).load_state_dict(part)
