"""VQ-GAN style tokenizer, manual optimisation, 16-bit mixed precision."""
import argparse

import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


def stack(channels, stride, transposed=False):
    layers = []
    for cin, cout in zip(channels[:-1], channels[1:]):
        conv = nn.ConvTranspose2d(cin, cout, 4, stride, 1) if transposed else nn.Conv2d(cin, cout, 4, stride, 1)
        layers += [conv, nn.GroupNorm(8, cout), nn.SiLU()]
    return nn.Sequential(*layers)


class Quantizer(nn.Module):
    def __init__(self, n=8192, dim=64, beta=0.25):
        super().__init__()
        self.book = nn.Embedding(n, dim)
        nn.init.uniform_(self.book.weight, -1 / n, 1 / n)
        self.beta = beta

    def forward(self, z):
        b, c, h, w = z.shape
        with torch.autocast(z.device.type, enabled=False):
            flat = z.float().permute(0, 2, 3, 1).reshape(-1, c)
            book = self.book.weight
            dist = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ book.t() + book.pow(2).sum(1)
            idx = dist.argmin(1)
            q = self.book(idx)
            loss = F.mse_loss(q, flat.detach()) + self.beta * F.mse_loss(flat, q.detach())
            q = flat + (q - flat).detach()
        return q.view(b, h, w, c).permute(0, 3, 1, 2), loss


class VQGAN(pl.LightningModule):
    def __init__(self, lr=2e-4, disc_start=10_000, disc_weight=0.1, clip=1.0):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.encoder = nn.Sequential(stack([3, 64, 128, 256], 2), nn.Conv2d(256, 64, 1))
        self.quant = Quantizer()
        self.decoder = nn.Sequential(nn.Conv2d(64, 256, 1), stack([256, 128, 64, 64], 2, True), nn.Conv2d(64, 3, 3, 1, 1))
        self.disc = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.SiLU(), stack([64, 128, 256], 2), nn.Conv2d(256, 1, 4))

    def configure_optimizers(self):
        ae = [*self.encoder.parameters(), *self.quant.parameters(), *self.decoder.parameters()]
        return (
            torch.optim.Adam(ae, self.hparams.lr, betas=(0.5, 0.9)),
            torch.optim.Adam(self.disc.parameters(), self.hparams.lr, betas=(0.5, 0.9)),
        )

    def on_before_optimizer_step(self, optimizer):
        params = [p for g in optimizer.param_groups for p in g["params"]]
        norm = torch.nn.utils.clip_grad_norm_(params, self.hparams.clip)
        self.log("grad_norm", norm)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        opt_ae, opt_d = self.optimizers()
        adversarial = self.global_step > self.hparams.disc_start

        self.toggle_optimizer(opt_ae)
        z, vq_loss = self.quant(self.encoder(x))
        rec = self.decoder(z)
        loss = F.l1_loss(rec, x) + vq_loss
        if adversarial:
            loss = loss - self.hparams.disc_weight * self.disc(rec).float().mean()
        opt_ae.zero_grad()
        self.manual_backward(loss)
        opt_ae.step()
        self.untoggle_optimizer(opt_ae)
        self.log("train/ae", loss, prog_bar=True)

        if adversarial:
            self.toggle_optimizer(opt_d)
            real, fake = self.disc(x).float(), self.disc(rec.detach()).float()
            loss_d = 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())
            opt_d.zero_grad()
            self.manual_backward(loss_d)
            opt_d.step()
            self.untoggle_optimizer(opt_d)
            self.log("train/disc", loss_d, prog_bar=True)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="data/ffhq128")
    ap.add_argument("--resume", default=None)
    args = ap.parse_args()
    tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)])
    loader = DataLoader(datasets.ImageFolder(args.data, tf), 64, shuffle=True, num_workers=8, drop_last=True)
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, precision="16-mixed", max_steps=400_000, callbacks=[ModelCheckpoint(save_last=True)]
    )
    trainer.fit(VQGAN(), loader, ckpt_path=args.resume)
