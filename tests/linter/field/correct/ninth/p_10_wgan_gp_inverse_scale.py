# why correct: the penalty's gradients are taken of scaled outputs and multiplied by the inverse scale before the norm; the total loss is scaled once for backward
import torch
import torch.nn as nn

Z = 100


def critic(c=64):
    return nn.Sequential(nn.Conv2d(1, c, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(c, 2 * c, 4, 2, 1), nn.LeakyReLU(0.2),
                         nn.Flatten(), nn.Linear(2 * c * 49, 1))


def generator(c=64):
    return nn.Sequential(nn.Linear(Z, 2 * c * 49), nn.Unflatten(1, (2 * c, 7, 7)), nn.BatchNorm2d(2 * c), nn.ReLU(),
                         nn.ConvTranspose2d(2 * c, c, 4, 2, 1), nn.BatchNorm2d(c), nn.ReLU(),
                         nn.ConvTranspose2d(c, 1, 4, 2, 1), nn.Tanh())


def penalty(D, real, fake, scaler):
    eps = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
    with torch.autocast("cuda", dtype=torch.float16):
        score = D(mix)
    total = score.float().sum()
    (g,) = torch.autograd.grad(scaler.scale(total), mix, create_graph=True)
    g = g * (1.0 / scaler.get_scale())
    with torch.autocast("cuda", dtype=torch.float16):
        norm = g.flatten(1).norm(2, dim=1)
        return ((norm - 1) ** 2).mean()


def train(loader, epochs=50, n_critic=5, lam=10.0):
    D, G = critic().cuda(), generator().cuda()
    od = torch.optim.Adam(D.parameters(), 1e-4, betas=(0.0, 0.9))
    og = torch.optim.Adam(G.parameters(), 1e-4, betas=(0.0, 0.9))
    sd, sg = torch.amp.GradScaler("cuda"), torch.amp.GradScaler("cuda")
    it = 0
    for e in range(epochs):
        for real, _ in loader:
            real = real.cuda()
            z = torch.randn(real.size(0), Z, device="cuda")
            with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
                fake = G(z).float()
            od.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                gap = D(fake).mean() - D(real).mean()
            loss = gap.float() + lam * penalty(D, real, fake, sd)
            sd.scale(loss).backward()
            sd.step(od)
            sd.update()
            it += 1
            if it % n_critic == 0:
                og.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    lg = -D(G(torch.randn_like(z))).mean()
                sg.scale(lg).backward()
                sg.step(og)
                sg.update()
        print(e, loss.item(), sd.get_scale(), sg.get_scale())
