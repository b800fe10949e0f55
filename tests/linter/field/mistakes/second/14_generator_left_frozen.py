"""
# source: https://github.com/SheldonTsui/GOF_NeurIPS2021/issues/2
# mistake: the generator is frozen for the discriminator's turn and never thawed, so its parameters get no gradients and scaler.step(optimizer_G) raises AssertionError (no inf checks recorded).
# severity: error
# torch: any
"""
import torch
import torch.nn.functional as F

import curriculums
from dataset import infinite
from networks import ImplicitGenerator, ProgressiveDiscriminator


def toggle(module, flag):
    for p in module.parameters():
        p.requires_grad_(flag)


def z_sampler(n, dim, device):
    return torch.randn((n, dim), device=device)


def train(opt):
    device = torch.device("cuda")
    meta = curriculums.extract(opt.curriculum)
    generator = ImplicitGenerator(meta["latent_dim"]).to(device)
    discriminator = ProgressiveDiscriminator().to(device)
    optimizer_G = torch.optim.Adam(generator.parameters(), lr=meta["gen_lr"], betas=(0, 0.9))
    optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=meta["disc_lr"], betas=(0, 0.9))
    scaler = torch.cuda.amp.GradScaler()

    for step, imgs in enumerate(infinite(opt.dataset, meta["batch_size"])):
        real = imgs.to(device, non_blocking=True)
        n = real.shape[0]

        # discriminator
        toggle(generator, False)  # <- here
        toggle(discriminator, True)
        with torch.cuda.amp.autocast():
            with torch.no_grad():
                fake = generator(z_sampler(n, meta["latent_dim"], device))
            d_loss = F.softplus(discriminator(fake)).mean() + F.softplus(-discriminator(real)).mean()
        optimizer_D.zero_grad(set_to_none=True)
        scaler.scale(d_loss).backward()
        scaler.unscale_(optimizer_D)
        torch.nn.utils.clip_grad_norm_(discriminator.parameters(), meta["grad_clip"])
        scaler.step(optimizer_D)

        # generator
        with torch.cuda.amp.autocast():
            fake = generator(z_sampler(n, meta["latent_dim"], device))
            g_loss = F.softplus(-discriminator(fake)).mean()
        optimizer_G.zero_grad(set_to_none=True)
        scaler.scale(g_loss).backward()
        scaler.unscale_(optimizer_G)
        torch.nn.utils.clip_grad_norm_(generator.parameters(), meta["grad_clip"])
        scaler.step(optimizer_G)  # <- here
        scaler.update()

        if step % 100 == 0:
            print(f"{step}: d {d_loss.item():.3f} g {g_loss.item():.3f}")
        if step >= opt.total_iters:
            return generator
