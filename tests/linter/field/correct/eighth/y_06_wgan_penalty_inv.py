# why correct: gradients for the penalty come from scaled outputs and are multiplied by 1/scale before the norm, as the gradient penalty recipe asks.
import math

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.optim import Adam


class Critic(nn.Module):
    def __init__(self, channels=2, width=64):
        super().__init__()
        layers, c = [], channels
        for i in range(5):
            layers += [nn.Conv1d(c, width * 2 ** min(i, 3), 25, stride=4, padding=11), nn.LeakyReLU(0.2)]
            c = width * 2 ** min(i, 3)
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(c * 16, 1)

    def forward(self, x):
        return self.head(self.body(x).flatten(1)).squeeze(1)


class Maker(nn.Module):
    def __init__(self, channels=2, latent=100, width=64):
        super().__init__()
        self.start = nn.Linear(latent, 16 * width * 8)
        chans = [width * 8, width * 8, width * 4, width * 2, width, channels]
        layers = []
        for a, b in zip(chans[:-1], chans[1:]):
            layers += [nn.ConvTranspose1d(a, b, 25, stride=4, padding=11, output_padding=1), nn.ReLU()]
        layers[-1] = nn.Tanh()
        self.body = nn.Sequential(*layers)

    def forward(self, z):
        return self.body(self.start(z).view(len(z), -1, 16))


def lipschitz_term(critic, real, fake, scaler):
    mix = torch.rand(len(real), 1, 1, device=real.device)
    between = (mix * real + (1 - mix) * fake).requires_grad_(True)
    with autocast():
        score = critic(between)
    scaled = torch.autograd.grad(scaler.scale(score.float().sum()), between, create_graph=True)[0]
    grads = scaled * (1.0 / scaler.get_scale())
    norm = grads.flatten(1).norm(2, dim=1)
    return ((norm - 1) ** 2).mean()


def critic_step(critic, maker, real, opt, scaler, weight=10.0):
    with torch.no_grad(), autocast():
        fake = maker(torch.randn(len(real), 100, device=real.device))
    fake = fake.float()
    opt.zero_grad()
    with autocast():
        wasserstein = critic(fake).float().mean() - critic(real).float().mean()
    penalty = lipschitz_term(critic, real, fake, scaler)
    scaler.scale(wasserstein + weight * penalty).backward()
    scaler.step(opt)
    scaler.update()
    return -wasserstein.item(), penalty.item()


def maker_step(critic, maker, n, opt, scaler):
    opt.zero_grad()
    with autocast():
        loss = -critic(maker(torch.randn(n, 100, device="cuda"))).float().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()


def fit(loader, steps, ratio=5):
    critic, maker = Critic().cuda(), Maker().cuda()
    opt_c = Adam(critic.parameters(), 1e-4, betas=(0.5, 0.9))
    opt_m = Adam(maker.parameters(), 1e-4, betas=(0.5, 0.9))
    scale_c, scale_m = GradScaler(init_scale=2.0 ** 10), GradScaler()
    best, step = -math.inf, 0
    while step < steps:
        for real in loader:
            w, p = critic_step(critic, maker, real.cuda(), opt_c, scale_c)
            if step % ratio == ratio - 1:
                maker_step(critic, maker, len(real), opt_m, scale_m)
            best = max(best, w)
            if step % 500 == 0:
                print(f"{step} distance {w:.3f} penalty {p:.4f} best {best:.3f}")
            step += 1
            if step == steps:
                break
    return maker
