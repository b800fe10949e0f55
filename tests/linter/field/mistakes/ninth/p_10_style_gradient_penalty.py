# source: lucidrains/stylegan2-pytorch#101
# mistake: the gradient penalty is computed from gradients of scaled outputs without dividing the scale out again, so the penalty grows with the loss scale
# severity: error
import torch
import torch.nn as nn
import torch.nn.functional as F


class Critic(nn.Module):
    def __init__(self, c=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, c, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(c, 2 * c, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * c, 4 * c, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * c, 1))

    def forward(self, x):
        return self.net(x)


def input_gradient_penalty(images, output, scaler, weight=10.0):
    grads = torch.autograd.grad(  # <- here
        outputs=scaler.scale(output),
        inputs=images,
        grad_outputs=torch.ones_like(output),
        create_graph=True,
        retain_graph=True,
    )[0]
    grads = grads.reshape(images.size(0), -1).float()
    return weight * ((grads.norm(2, dim=1) - 1) ** 2).mean()  # <- here


def critic_step(D, G, real, latent_dim, opt, scaler, penalise):
    z = torch.randn(real.size(0), latent_dim, device=real.device)
    real = real.detach().requires_grad_(penalise)
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        with torch.no_grad():
            fake = G(z)
        d_real = D(real)
        d_fake = D(fake)
        hinge = F.relu(1 + d_fake).mean() + F.relu(1 - d_real).mean()
    gp = input_gradient_penalty(real, d_real.float().sum(1), scaler) if penalise else 0.0
    loss = hinge.float() + gp
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return loss.detach()


def generator_step(D, G, n, latent_dim, opt, scaler, device):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = -D(G(torch.randn(n, latent_dim, device=device))).mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return loss.detach()


def train(G, loader, latent_dim=512, steps=100000, device="cuda"):
    D = Critic().to(device)
    G = G.to(device)
    d_opt = torch.optim.Adam(D.parameters(), 2e-4, betas=(0.5, 0.9))
    g_opt = torch.optim.Adam(G.parameters(), 2e-4, betas=(0.5, 0.9))
    d_scaler = torch.amp.GradScaler("cuda")
    g_scaler = torch.amp.GradScaler("cuda")
    for step, real in zip(range(steps), loader):
        d = critic_step(D, G, real.to(device), latent_dim, d_opt, d_scaler, penalise=step % 4 == 0)
        g = generator_step(D, G, real.size(0), latent_dim, g_opt, g_scaler, device)
        if step % 500 == 0:
            print(step, d.item(), g.item())
