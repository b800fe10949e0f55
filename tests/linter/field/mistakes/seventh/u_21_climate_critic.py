# source: https://discuss.pytorch.org/t/what-is-the-correct-way-of-computing-a-grad-penalty-using-amp/95827 (see pytorch/pytorch PR #44667)
# mistake: the penalty uses gradients of the scaled critic output without dividing them by the loss scale, so the penalty compares numbers ~65536 times too large with 1
# severity: error
import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast


def interpolate(real, fake):
    mix = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    return (mix * real + (1 - mix) * fake).requires_grad_(True)


def lipschitz_term(critic, real, fake, scaler):
    points = interpolate(real, fake)
    with autocast():
        scores = critic(points)
    grads = torch.autograd.grad(
        outputs=scaler.scale(scores.float().sum()),  # <- here
        inputs=points,
        create_graph=True,
    )[0]
    norms = grads.flatten(1).norm(2, dim=1)  # <- here
    return ((norms - 1.0) ** 2).mean()  # <- here


def critic_update(critic, generator, real, noise, optimizer, scaler, gp_weight):
    with torch.no_grad(), autocast():
        fake = generator(noise)
    fake = fake.float()
    with autocast():
        w_dist = critic(fake).float().mean() - critic(real).float().mean()
    loss = w_dist + gp_weight * lipschitz_term(critic, real, fake, scaler)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return -w_dist.item()


def generator_update(critic, generator, noise, optimizer, scaler):
    with autocast():
        loss = -critic(generator(noise)).float().mean()
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def train(generator, critic, loader, epochs, z_dim=64, n_critic=5, gp_weight=10.0):
    generator, critic = generator.cuda(), critic.cuda()
    opt_g = torch.optim.Adam(generator.parameters(), 1e-4, betas=(0.0, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), 1e-4, betas=(0.0, 0.9))
    scaler_g, scaler_c = GradScaler(), GradScaler()
    it = 0
    for epoch in range(epochs):
        for fields in loader:
            fields = fields.cuda(non_blocking=True)
            z = torch.randn(fields.size(0), z_dim, device="cuda")
            w = critic_update(critic, generator, fields, z, opt_c, scaler_c, gp_weight)
            it += 1
            if it % n_critic == 0:
                z = torch.randn(fields.size(0), z_dim, device="cuda")
                generator_update(critic, generator, z, opt_g, scaler_g)
        print(f"epoch {epoch}: wasserstein estimate {w:.4f}")
