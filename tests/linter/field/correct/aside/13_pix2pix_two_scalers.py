# style of: aladdinpersson/Machine-Learning-Collection:ML/Pytorch/GANs/Pix2Pix/train.py
# torch: 1.6+
import torch
import torch.nn as nn
import torch.optim as optim
from tqdm import tqdm

import config
from networks import PatchDiscriminator, UNetGenerator

torch.backends.cudnn.benchmark = True


def train_fn(disc, gen, loader, opt_disc, opt_gen, l1, bce, g_scaler, d_scaler):
    loop = tqdm(loader, leave=True)
    for idx, (x, y) in enumerate(loop):
        x = x.to(config.DEVICE)
        y = y.to(config.DEVICE)

        # Discriminator
        with torch.cuda.amp.autocast():
            y_fake = gen(x)
            d_real = disc(x, y)
            d_fake = disc(x, y_fake.detach())
            d_real_loss = bce(d_real, torch.ones_like(d_real))
            d_fake_loss = bce(d_fake, torch.zeros_like(d_fake))
            d_loss = (d_real_loss + d_fake_loss) / 2

        disc.zero_grad()
        d_scaler.scale(d_loss).backward()
        d_scaler.step(opt_disc)
        d_scaler.update()

        # Generator
        with torch.cuda.amp.autocast():
            d_fake = disc(x, y_fake)
            g_adv = bce(d_fake, torch.ones_like(d_fake))
            g_l1 = l1(y_fake, y) * config.L1_LAMBDA
            g_loss = g_adv + g_l1

        opt_gen.zero_grad()
        g_scaler.scale(g_loss).backward()
        g_scaler.step(opt_gen)
        g_scaler.update()

        if idx % 10 == 0:
            loop.set_postfix(
                d_real=torch.sigmoid(d_real).mean().item(),
                d_fake=torch.sigmoid(d_fake).mean().item(),
            )


def main(loader):
    disc = PatchDiscriminator(in_channels=3).to(config.DEVICE)
    gen = UNetGenerator(in_channels=3).to(config.DEVICE)
    opt_disc = optim.Adam(disc.parameters(), lr=config.LEARNING_RATE, betas=(0.5, 0.999))
    opt_gen = optim.Adam(gen.parameters(), lr=config.LEARNING_RATE, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    l1 = nn.L1Loss()
    g_scaler = torch.cuda.amp.GradScaler()
    d_scaler = torch.cuda.amp.GradScaler()

    for epoch in range(config.NUM_EPOCHS):
        train_fn(disc, gen, loader, opt_disc, opt_gen, l1, bce, g_scaler, d_scaler)
        if config.SAVE_MODEL and epoch % 5 == 0:
            torch.save({"state_dict": gen.state_dict()}, config.CHECKPOINT_GEN)
            torch.save({"state_dict": disc.state_dict()}, config.CHECKPOINT_DISC)
