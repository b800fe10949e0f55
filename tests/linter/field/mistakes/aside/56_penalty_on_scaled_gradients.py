# source: https://github.com/lucidrains/stylegan2-pytorch/pull/101
# mistake: the gradient penalty is computed from gradients of the scaled output without dividing by the scale, so their norm is compared with one at 65536 times its size.
# severity: error
# torch: any
import argparse

import torch
from torch.amp import GradScaler, autocast

from gan import Critic, Generator, image_loader


def gradient_penalty(critic, real, fake, scaler, weight=10.0):
    alpha = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    with autocast("cuda", dtype=torch.float16):
        score = critic(mixed)
    scaled = scaler.scale(score.float().sum())
    grads = torch.autograd.grad(outputs=scaled, inputs=mixed, create_graph=True)[0]
    norms = grads.flatten(1).float().norm(2, dim=1)
    return weight * ((norms - 1) ** 2).mean()  # <- here


def main(args):
    device = torch.device("cuda")
    gen, critic = Generator(args.latent).to(device), Critic().to(device)
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-4, betas=(0.0, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=4e-4, betas=(0.0, 0.9))
    scaler_g, scaler_c = GradScaler("cuda"), GradScaler("cuda")

    for step, real in enumerate(image_loader(args.data, args.batch)):
        real = real.to(device)
        opt_c.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            with torch.no_grad():
                fake = gen(torch.randn(real.size(0), args.latent, device=device)).float()
            loss_c = critic(fake).float().mean() - critic(real).float().mean()
        loss_c = loss_c + gradient_penalty(critic, real, fake, scaler_c)
        scaler_c.scale(loss_c).backward()
        scaler_c.step(opt_c)
        scaler_c.update()

        if step % args.n_critic == 0:
            opt_g.zero_grad()
            with autocast("cuda", dtype=torch.float16):
                loss_g = -critic(gen(torch.randn(real.size(0), args.latent, device=device))).float().mean()
            scaler_g.scale(loss_g).backward()
            scaler_g.step(opt_g)
            scaler_g.update()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="faces")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--latent", type=int, default=128)
    parser.add_argument("--n_critic", type=int, default=5)
    main(parser.parse_args())
