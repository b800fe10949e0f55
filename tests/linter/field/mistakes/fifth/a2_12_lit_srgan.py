# source: https://github.com/ESAOpenSR/SRGAN/pull/88
# mistake: under manual optimisation with precision "16-mixed", manual_backward leaves scaled gradients and clip_gradients clips them before anything has unscaled them
# severity: error
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


def conv(i, o, s=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, s, 1), nn.LeakyReLU(0.2))


class SuperSentinel(L.LightningModule):
    def __init__(self, bands=4, lr_g=1e-4, lr_d=1e-4, adv=1e-3, max_norm=1.0):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.gen = nn.Sequential(conv(bands, 64), *[conv(64, 64) for _ in range(8)],
                                 nn.Conv2d(64, bands * 16, 3, 1, 1), nn.PixelShuffle(4))
        self.disc = nn.Sequential(conv(bands, 64, 2), conv(64, 128, 2), conv(128, 256, 2),
                                  nn.Conv2d(256, 1, 3, 1, 1))

    def forward(self, lr):
        return self.gen(lr)

    def adversarial(self, score, real):
        return F.binary_cross_entropy_with_logits(score, torch.full_like(score, float(real)))

    def training_step(self, batch, batch_idx):
        lr, hr = batch
        opt_g, opt_d = self.optimizers()
        hp = self.hparams

        self.toggle_optimizer(opt_d)
        with torch.no_grad():
            sr = self.gen(lr)
        loss_d = self.adversarial(self.disc(hr), True) + self.adversarial(self.disc(sr), False)
        opt_d.zero_grad()
        self.manual_backward(loss_d)  # <- here
        self.clip_gradients(opt_d, gradient_clip_val=hp.max_norm, gradient_clip_algorithm="norm")  # <- here
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.toggle_optimizer(opt_g)
        sr = self.gen(lr)
        loss_g = F.l1_loss(sr, hr) + hp.adv * self.adversarial(self.disc(sr), True)
        opt_g.zero_grad()
        self.manual_backward(loss_g)  # <- here
        self.clip_gradients(opt_g, gradient_clip_val=hp.max_norm, gradient_clip_algorithm="norm")  # <- here
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.log_dict({"g": loss_g.detach(), "d": loss_d.detach()}, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        lr, hr = batch
        mse = F.mse_loss(self(lr).float().clamp(0, 1), hr.float())
        self.log("psnr", -10 * torch.log10(mse))

    def configure_optimizers(self):
        g = torch.optim.Adam(self.gen.parameters(), lr=self.hparams.lr_g, betas=(0.9, 0.999))
        d = torch.optim.Adam(self.disc.parameters(), lr=self.hparams.lr_d, betas=(0.9, 0.999))
        return [g, d], []


def main(datamodule):
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision="16-mixed",
        max_epochs=400,
        callbacks=[L.pytorch.callbacks.ModelCheckpoint(monitor="psnr", mode="max", save_last=True)],
    )
    trainer.fit(SuperSentinel(), datamodule=datamodule)
