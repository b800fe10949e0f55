"""
# style of: rosinality/stylegan2-pytorch:train.py
# correct: one scaler per network; the R1 gradients come from scaled outputs and are divided by the scale again before the penalty is formed and itself scaled.
# torch: 1.10+
"""
import argparse

import torch
from torch import autograd, optim
from torch.nn import functional as F

from images import sample_data
from stylegan import Discriminator, Generator


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


def accumulate(model1, model2, decay=0.999):
    par1, par2 = dict(model1.named_parameters()), dict(model2.named_parameters())
    for k in par1:
        par1[k].data.mul_(decay).add_(par2[k].data, alpha=1 - decay)


def r1_penalty(discriminator, real_img, scaler, amp):
    real_img = real_img.detach().requires_grad_(True)
    with torch.cuda.amp.autocast(enabled=amp):
        real_pred = discriminator(real_img)
    (scaled_grad,) = autograd.grad(outputs=scaler.scale(real_pred.float().sum()), inputs=real_img, create_graph=True)
    grad_real = scaled_grad * (1.0 / scaler.get_scale())
    return grad_real.float().pow(2).reshape(grad_real.shape[0], -1).sum(1).mean(), real_pred


def train(args, loader, generator, discriminator, g_ema, device):
    g_optim = optim.Adam(generator.parameters(), lr=args.lr, betas=(0, 0.99))
    d_optim = optim.Adam(discriminator.parameters(), lr=args.lr, betas=(0, 0.99))
    g_scaler = torch.cuda.amp.GradScaler(enabled=args.amp)
    d_scaler = torch.cuda.amp.GradScaler(enabled=args.amp)

    for i in range(args.iter):
        real_img = next(loader).to(device)

        requires_grad(generator, False)
        requires_grad(discriminator, True)
        with torch.cuda.amp.autocast(enabled=args.amp):
            fake_img, _ = generator([torch.randn(args.batch, args.latent, device=device)])
            d_loss = F.softplus(discriminator(fake_img)).mean() + F.softplus(-discriminator(real_img)).mean()
        discriminator.zero_grad()
        d_scaler.scale(d_loss).backward()
        d_scaler.step(d_optim)
        d_scaler.update()

        if i % args.d_reg_every == 0:
            r1_loss, real_pred = r1_penalty(discriminator, real_img, d_scaler, args.amp)
            discriminator.zero_grad()
            d_scaler.scale(args.r1 / 2 * r1_loss * args.d_reg_every + 0 * real_pred[0].float().sum()).backward()
            d_scaler.step(d_optim)
            d_scaler.update()

        requires_grad(generator, True)
        requires_grad(discriminator, False)
        with torch.cuda.amp.autocast(enabled=args.amp):
            fake_img, _ = generator([torch.randn(args.batch, args.latent, device=device)])
            g_loss = F.softplus(-discriminator(fake_img)).mean()
        generator.zero_grad()
        g_scaler.scale(g_loss).backward()
        before = g_scaler.get_scale()
        g_scaler.step(g_optim)
        g_scaler.update()
        if g_scaler.get_scale() >= before:
            accumulate(g_ema, generator, 0.5 ** (32 / 10_000))

        if i % 100 == 0:
            print(f"{i}: d {d_loss.item():.3f} g {g_loss.item():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--iter", type=int, default=800000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--latent", type=int, default=512)
    parser.add_argument("--r1", type=float, default=10)
    parser.add_argument("--d_reg_every", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--amp", action="store_true")
    args = parser.parse_args()
    nets = [Generator(256, args.latent).cuda(), Discriminator(256).cuda(), Generator(256, args.latent).cuda().eval()]
    accumulate(nets[2], nets[0], 0)
    train(args, sample_data(args.batch), *nets, "cuda")
