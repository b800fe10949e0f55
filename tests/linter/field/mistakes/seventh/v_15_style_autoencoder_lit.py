# source: Lightning-AI/pytorch-lightning issue #19695 https://github.com/Lightning-AI/pytorch-lightning/issues/19695
# mistake: manual optimization under 16-mixed calls backward on the loss itself, bypassing the precision plugin, whose unscale then fails
# severity: error
import pytorch_lightning as pl
import torch
import torch.nn as nn
import torch.nn.functional as F


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 4, 2, 1), nn.InstanceNorm2d(o), nn.LeakyReLU(0.2))


def deconv(i, o):
    return nn.Sequential(nn.ConvTranspose2d(i, o, 4, 2, 1), nn.InstanceNorm2d(o), nn.ReLU())


class StyleSplit(pl.LightningModule):
    def __init__(self, lr=3e-4):
        super().__init__()
        self.automatic_optimization = False
        self.lr = lr
        self.content = nn.Sequential(conv(3, 64), conv(64, 128), conv(128, 256))
        self.style = nn.Sequential(conv(3, 64), conv(64, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.mix = nn.Linear(64, 256)
        self.decoder = nn.Sequential(deconv(256, 128), deconv(128, 64), nn.ConvTranspose2d(64, 3, 4, 2, 1))

    def forward(self, x):
        c, s = self.content(x), self.style(x)
        return self.decoder(c * self.mix(s)[:, :, None, None]), s

    def configure_optimizers(self):
        enc = list(self.content.parameters()) + list(self.style.parameters())
        dec = list(self.decoder.parameters()) + list(self.mix.parameters())
        o1 = torch.optim.Adam(enc, lr=self.lr)
        o2 = torch.optim.Adam(dec, lr=2 * self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(o1, patience=3)
        return [o1, o2], [plateau]

    def training_step(self, batch, batch_idx):
        enc_opt, dec_opt = self.optimizers()
        enc_opt.zero_grad()
        dec_opt.zero_grad()
        recon, code = self(batch)
        loss = F.l1_loss(recon, batch) + 1e-3 * code.pow(2).mean()
        loss.backward()  # <- here
        enc_opt.step()
        dec_opt.step()
        self.log("train/l1", loss, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        recon, _ = self(batch)
        self.log("val/l1", F.l1_loss(recon, batch))

    def on_validation_epoch_end(self):
        self.lr_schedulers().step(self.trainer.callback_metrics["val/l1"])


if __name__ == "__main__":
    from art import ArtData

    trainer = pl.Trainer(accelerator="gpu", devices=2, strategy="ddp", precision="16-mixed", max_epochs=60)  # <- here
    trainer.fit(StyleSplit(), datamodule=ArtData(size=256, batch_size=24))
