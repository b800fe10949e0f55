# why correct: the input gradients are taken from scaled critic outputs and divided by the scale before the penalty; the total loss is then scaled as usual
import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast


def critic_net(c=64):
    act = lambda: nn.LeakyReLU(0.2)
    return nn.Sequential(nn.Conv2d(3, c, 4, 2, 1), act(), nn.Conv2d(c, 2 * c, 4, 2, 1), act(),
                         nn.Conv2d(2 * c, 4 * c, 4, 2, 1), act(), nn.Flatten(), nn.Linear(4 * c * 64, 1))


def generator_net(z=128, c=64):
    return nn.Sequential(nn.Linear(z, 4 * c * 64), nn.Unflatten(1, (4 * c, 8, 8)),
                         nn.ConvTranspose2d(4 * c, 2 * c, 4, 2, 1), nn.BatchNorm2d(2 * c), nn.ReLU(),
                         nn.ConvTranspose2d(2 * c, c, 4, 2, 1), nn.BatchNorm2d(c), nn.ReLU(),
                         nn.ConvTranspose2d(c, 3, 4, 2, 1), nn.Tanh())


class Penalty:
    def __init__(self, critic, scaler, weight=10.0):
        self.critic, self.scaler, self.weight = critic, scaler, weight

    def __call__(self, real, fake):
        eps = torch.rand(len(real), 1, 1, 1, device=real.device)
        mix = (eps * real + (1 - eps) * fake.float()).requires_grad_()
        with autocast():
            score = self.critic(mix)
        (scaled,) = torch.autograd.grad(self.scaler.scale(score.float().sum()), mix, create_graph=True)
        grad = scaled.float() * (1.0 / self.scaler.get_scale())
        norm = grad.flatten(1).norm(dim=1)
        return self.weight * (norm - 1).square().mean()


def sample(generator, n):
    with autocast():
        return generator(torch.randn(n, 128, device="cuda"))


def critic_step(critic, generator, real, opt, scaler, penalty):
    with torch.no_grad():
        fake = sample(generator, len(real))
    with autocast():
        wasserstein = critic(fake).float().mean() - critic(real).float().mean()
    loss = wasserstein + penalty(real, fake)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return wasserstein.detach()


def generator_step(critic, generator, n, opt, scaler):
    with autocast():
        loss = -critic(generator(torch.randn(n, 128, device="cuda"))).float().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return loss.detach()


def main(loader, epochs=100, n_critic=5):
    critic, generator = critic_net().cuda(), generator_net().cuda()
    oc = torch.optim.Adam(critic.parameters(), 1e-4, betas=(0.0, 0.9))
    og = torch.optim.Adam(generator.parameters(), 1e-4, betas=(0.0, 0.9))
    sc, sg = GradScaler(init_scale=1024.0), GradScaler()
    penalty = Penalty(critic, sc)
    g = torch.zeros(())
    for epoch in range(epochs):
        for i, real in enumerate(loader):
            w = critic_step(critic, generator, real.cuda(), oc, sc, penalty)
            if (i + 1) % n_critic == 0:
                g = generator_step(critic, generator, len(real), og, sg)
        print(epoch, w.item(), g.item())
