import torch


def penalty(critic, real, fake):
    eps = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mixed = (eps * real + (1 - eps) * fake).requires_grad_(True)
    with torch.autocast("cuda", enabled=False):
        out = critic(mixed.float())
        grads = torch.autograd.grad(out.sum(), mixed, create_graph=True)[0]
        return ((grads.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


def train(critic, generator, opt_c, opt_g, loader, latent):
    for i, real in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            fake = generator(torch.randn(real.size(0), latent, device=real.device))
            loss_c = critic(fake.detach()).mean() - critic(real).mean()
        loss_c = loss_c + 10 * penalty(critic, real, fake.detach())
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        if i % 5 == 0:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss_g = -critic(generator(torch.randn(real.size(0), latent, device=real.device))).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
