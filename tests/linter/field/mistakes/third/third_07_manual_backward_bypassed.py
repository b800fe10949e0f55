import itertools

import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


def conv_block(c_in, c_out, stride):
    return nn.Sequential(nn.Conv2d(c_in, c_out, 4, stride, 1), nn.InstanceNorm2d(c_out), nn.LeakyReLU(0.2))


class AutoencodingGAN(pl.LightningModule):
    def __init__(self, lr=2e-4, adv_weight=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.encoder = nn.Sequential(conv_block(3, 64, 2), conv_block(64, 128, 2))
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh(),
        )
        self.disc = nn.Sequential(conv_block(3, 64, 2), conv_block(64, 128, 2), nn.Conv2d(128, 1, 3, 1, 1))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        opt_ae, opt_d = self.optimizers()

        self.toggle_optimizer(opt_ae)
        recon = self(x)
        logits_fake = self.disc(recon)
        rec_loss = F.l1_loss(recon, x)
        adv_loss = F.binary_cross_entropy_with_logits(logits_fake, torch.ones_like(logits_fake))
        loss_ae = rec_loss + self.hparams.adv_weight * adv_loss
        opt_ae.zero_grad()
        loss_ae.backward()  # <- here
        opt_ae.step()
        self.untoggle_optimizer(opt_ae)

        self.toggle_optimizer(opt_d)
        real, fake = self.disc(x), self.disc(recon.detach())
        loss_d = 0.5 * (
            F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
            + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))
        )
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.log_dict({"rec": rec_loss, "adv": adv_loss, "disc": loss_d}, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        self.log("val_rec", F.l1_loss(self(x), x))

    def configure_optimizers(self):
        ae_params = itertools.chain(self.encoder.parameters(), self.decoder.parameters())
        return [
            torch.optim.Adam(ae_params, lr=self.hparams.lr, betas=(0.5, 0.999)),
            torch.optim.Adam(self.disc.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999)),
        ]


def main():
    tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)])
    train = datasets.SVHN("data", split="train", transform=tf, download=True)
    val = datasets.SVHN("data", split="test", transform=tf, download=True)
    trainer = pl.Trainer(max_epochs=30, accelerator="gpu", devices=1, precision="16-mixed")
    trainer.fit(
        AutoencodingGAN(),
        DataLoader(train, 128, shuffle=True, num_workers=4, drop_last=True),
        DataLoader(val, 256, num_workers=4),
    )


if __name__ == "__main__":
    main()
