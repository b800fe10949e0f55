# why correct: the gradients for the penalty come from a scaled score and are divided by the current scale before the norm is taken; each of the two scalers belongs to one optimizer
import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast

NOISE, PARTICLES, FEATURES = 128, 150, 4


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(NOISE, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, PARTICLES * FEATURES)
        )

    def forward(self, z):
        return self.net(z).view(-1, PARTICLES, FEATURES)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(FEATURES, 128), nn.LeakyReLU(0.2), nn.Linear(128, 256), nn.LeakyReLU(0.2))
        self.rho = nn.Sequential(nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))

    def forward(self, jets):
        return self.rho(self.phi(jets).mean(1)).squeeze(-1)


def penalty(critic, scaler, real, fake):
    mix = torch.rand(real.shape[0], 1, 1, device=real.device)
    point = (mix * real + (1 - mix) * fake).requires_grad_(True)
    with autocast():
        score = critic(point).float().sum()
    grad, = torch.autograd.grad(scaler.scale(score), point, create_graph=True)
    grad = grad / scaler.get_scale()
    with autocast():
        norm = grad.float().flatten(1).norm(dim=1)
        return (norm - 1).square().mean()


def sample(gen, n):
    with autocast():
        return gen(torch.randn(n, NOISE, device="cuda")).float()


def train(loader, steps, critic_steps=5, weight=10.0):
    gen, critic = Generator().cuda(), Critic().cuda()
    opt_g = torch.optim.Adam(gen.parameters(), 1e-4, betas=(0.0, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), 1e-4, betas=(0.0, 0.9))
    scaler_g, scaler_c = GradScaler(), GradScaler()

    for step, real in zip(range(steps), loader):
        real = real.cuda(non_blocking=True)
        with torch.no_grad():
            fake = sample(gen, real.shape[0])
        opt_c.zero_grad(set_to_none=True)
        with autocast():
            distance = critic(fake).float().mean() - critic(real).float().mean()
        loss_c = distance + weight * penalty(critic, scaler_c, real, fake)
        scaler_c.scale(loss_c).backward()
        scaler_c.step(opt_c)
        scaler_c.update()

        if step % critic_steps == critic_steps - 1:
            opt_g.zero_grad(set_to_none=True)
            with autocast():
                loss_g = -critic(sample(gen, real.shape[0])).float().mean()
            scaler_g.scale(loss_g).backward()
            scaler_g.step(opt_g)
            scaler_g.update()
        if step % 500 == 0:
            print(step, -distance.item(), scaler_c.get_scale())
    return gen
