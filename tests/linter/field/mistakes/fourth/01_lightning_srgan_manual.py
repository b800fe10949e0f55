# re-expressed from github.com/ESAOpenSR/SRGAN pull 88: manual optimisation loop clipped gradients that were still multiplied by the loss scale
import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class PatchDataset(Dataset):
    def __init__(self, root):
        self.files = sorted(Path(root).glob("*.pt"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        item = torch.load(self.files[i], weights_only=True)
        return item["lr"], item["hr"]


class ResBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(c, c, 3, 1, 1), nn.PReLU(), nn.Conv2d(c, c, 3, 1, 1))

    def forward(self, x):
        return x + 0.1 * self.body(x)


class Generator(nn.Module):
    def __init__(self, c=64, n=16, bands=4):
        super().__init__()
        self.head = nn.Conv2d(bands, c, 3, 1, 1)
        self.trunk = nn.Sequential(*[ResBlock(c) for _ in range(n)])
        self.up = nn.Sequential(nn.Conv2d(c, c * 16, 3, 1, 1), nn.PixelShuffle(4), nn.Conv2d(c, bands, 3, 1, 1))

    def forward(self, x):
        h = self.head(x)
        return self.up(h + self.trunk(h))


def build_discriminator(bands=4, c=64):
    layers, cin = [], bands
    for mult in (1, 2, 4, 8):
        layers += [nn.Conv2d(cin, c * mult, 4, 2, 1), nn.LeakyReLU(0.2, True)]
        cin = c * mult
    return nn.Sequential(*layers, nn.Conv2d(cin, 1, 3, 1, 1))


class SuperResGAN(pl.LightningModule):
    def __init__(self, lr_g=1e-4, lr_d=1e-4, adv_weight=1e-3, grad_clip=0.5, pretrain_steps=20_000):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = Generator()
        self.discriminator = build_discriminator()

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr_g, betas=(0.9, 0.99))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr_d, betas=(0.9, 0.99))
        return opt_g, opt_d

    def _apply_step(self, opt, loss):
        opt.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(opt, gradient_clip_val=self.hparams.grad_clip, gradient_clip_algorithm="norm")  # <- here
        opt.step()

    def training_step(self, batch, batch_idx):
        lr_img, hr_img = batch
        opt_g, opt_d = self.optimizers()
        sr = self.generator(lr_img)
        content = F.l1_loss(sr, hr_img)

        if self.global_step < self.hparams.pretrain_steps:
            self._apply_step(opt_g, content)
            self.log("train/content", content)
            return

        self.toggle_optimizer(opt_d)
        real, fake = self.discriminator(hr_img), self.discriminator(sr.detach())
        loss_d = F.softplus(-real).mean() + F.softplus(fake).mean()
        self._apply_step(opt_d, loss_d)
        self.untoggle_optimizer(opt_d)

        self.toggle_optimizer(opt_g)
        sr = self.generator(lr_img)
        adv = F.softplus(-self.discriminator(sr)).mean()
        loss_g = F.l1_loss(sr, hr_img) + self.hparams.adv_weight * adv
        self._apply_step(opt_g, loss_g)
        self.untoggle_optimizer(opt_g)
        self.log_dict({"train/loss_d": loss_d, "train/loss_g": loss_g, "train/adv": adv})


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--resume", default=None)
    args = ap.parse_args()
    loader = DataLoader(PatchDataset(args.data), batch_size=16, shuffle=True, num_workers=8, pin_memory=True)
    trainer = pl.Trainer(accelerator="gpu", devices=1, precision="16-mixed", max_epochs=200)
    trainer.fit(SuperResGAN(), loader, ckpt_path=args.resume)
