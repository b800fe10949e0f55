# why correct: the out-of-place gradients of the scaled score are divided by the scale before the penalty, which is then scaled again for backward
import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class CriticObjective:
    def __init__(self, critic, scaler, weight=10.0):
        self.critic = critic
        self.scaler = scaler
        self.weight = weight

    def _unscaled_input_grads(self, x):
        with autocast():
            out = self.critic(x)
        scaled = torch.autograd.grad(self.scaler.scale(out.float().sum()), x, create_graph=True)[0]
        return scaled * (1.0 / self.scaler.get_scale())

    def penalty(self, real, fake):
        t = torch.rand(real.size(0), 1, device=real.device)
        x = torch.lerp(real, fake, t).requires_grad_(True)
        g = self._unscaled_input_grads(x)
        with autocast(enabled=False):
            return (g.float().norm(dim=1) - 1).square().mean()

    def __call__(self, real, fake):
        with autocast():
            gap = self.critic(fake).float().mean() - self.critic(real).float().mean()
        return gap + self.weight * self.penalty(real, fake)


def mlp(i, o, w=512):
    return nn.Sequential(nn.Linear(i, w), nn.SiLU(), nn.Linear(w, w), nn.SiLU(), nn.Linear(w, o))


def step(scaler, optimizer, loss):
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def main(loader, dim=32, z_dim=16, rounds=10_000, n_critic=4):
    gen, critic = mlp(z_dim, dim).cuda(), mlp(dim, 1).cuda()
    opt_g = torch.optim.Adam(gen.parameters(), 1e-4, betas=(0.0, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), 1e-4, betas=(0.0, 0.9))
    scaler_g, scaler_c = GradScaler(), GradScaler()
    objective = CriticObjective(critic, scaler_c)
    source = iter(loader)
    for r in range(rounds):
        for _ in range(n_critic):
            try:
                real = next(source).cuda()
            except StopIteration:
                source = iter(loader)
                real = next(source).cuda()
            with torch.no_grad(), autocast():
                fake = gen(torch.randn(real.size(0), z_dim, device="cuda"))
            loss_c = objective(real, fake.float())
            step(scaler_c, opt_c, loss_c)
        with autocast():
            loss_g = -critic(gen(torch.randn(real.size(0), z_dim, device="cuda"))).float().mean()
        step(scaler_g, opt_g, loss_g)
        if r % 100 == 0:
            print(r, loss_c.item(), loss_g.item())
