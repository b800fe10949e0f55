# source: lucidrains/stylegan2-pytorch PR #101 https://github.com/lucidrains/stylegan2-pytorch/pull/101
# mistake: the gradient penalty is taken from input gradients of the scaled scores without dividing by the scale, so it pushes scale*|grad| to 1
# severity: error
import torch
from torch import nn, optim
from torch.cuda import amp

Z, LAMBDA, CRITIC_STEPS = 128, 10.0, 5


def critic():
    chan = [3, 64, 128, 256, 512]
    mods = []
    for i, o in zip(chan, chan[1:]):
        mods += [nn.Conv2d(i, o, 5, 2, 2), nn.LeakyReLU(0.2)]
    return nn.Sequential(*mods, nn.Flatten(), nn.Linear(512 * 16, 1))


def generator():
    chan = [512, 256, 128, 64]
    mods = [nn.Linear(Z, 512 * 16), nn.Unflatten(1, (512, 4, 4))]
    for i, o in zip(chan, chan[1:]):
        mods += [nn.Upsample(scale_factor=2), nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*mods, nn.Upsample(scale_factor=2), nn.Conv2d(64, 3, 3, padding=1), nn.Tanh())


def penalty(net, real, fake, scaler):
    w = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mid = (w * real + (1 - w) * fake).requires_grad_(True)
    with amp.autocast():
        score = net(mid).sum()
    (g,) = torch.autograd.grad(scaler.scale(score), mid, create_graph=True)  # <- here
    norm = g.float().flatten(1).norm(dim=1)  # <- here
    return (norm - 1).square().mean()  # <- here


def run(loader, steps):
    G, D = generator().cuda(), critic().cuda()
    og = optim.Adam(G.parameters(), 1e-4, betas=(0.0, 0.9))
    od = optim.Adam(D.parameters(), 1e-4, betas=(0.0, 0.9))
    sg, sd = amp.GradScaler(), amp.GradScaler()
    images = iter(loader)
    for step in range(steps):
        for _ in range(CRITIC_STEPS):
            real = next(images).cuda()
            with torch.no_grad(), amp.autocast():
                fake = G(torch.randn(real.size(0), Z, device="cuda"))
            fake = fake.float()
            od.zero_grad()
            with amp.autocast():
                gap = D(fake).mean() - D(real).mean()
            loss = gap + LAMBDA * penalty(D, real, fake, sd)
            sd.scale(loss).backward()
            sd.step(od)
            sd.update()

        og.zero_grad()
        with amp.autocast():
            g_loss = -D(G(torch.randn(64, Z, device="cuda"))).mean()
        sg.scale(g_loss).backward()
        sg.step(og)
        sg.update()
        if step % 100 == 0:
            print(step, f"W={-gap.item():.3f} G={g_loss.item():.3f}")


if __name__ == "__main__":
    from bedrooms import infinite

    run(infinite(size=64, batch=64), 100_000)
