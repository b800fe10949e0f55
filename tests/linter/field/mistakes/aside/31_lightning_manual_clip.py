# source: https://github.com/ESAOpenSR/SRGAN/pull/88
# mistake: in a manually optimised module under 16-mixed precision gradients are clipped before opt.step(), which is where Lightning unscales them.
# severity: error
# torch: any
import lightning.pytorch as pl
import torch
from torch import nn


class SatelliteSRGAN(pl.LightningModule):
    def __init__(self, generator, discriminator, cfg):
        super().__init__()
        self.automatic_optimization = False
        self.generator = generator
        self.discriminator = discriminator
        self.cfg = cfg
        self.content = nn.L1Loss()
        self.adversarial = nn.BCEWithLogitsLoss()

    def configure_optimizers(self):
        g = torch.optim.Adam(self.generator.parameters(), lr=self.cfg["lr_g"])
        d = torch.optim.Adam(self.discriminator.parameters(), lr=self.cfg["lr_d"])
        return [d, g], []

    def _clip(self, params):
        limit = self.cfg.get("gradient_clip_val", 0.0)
        if limit > 0:
            torch.nn.utils.clip_grad_norm_(params, limit)  # <- here

    def training_step(self, batch, batch_idx):
        lr_img, hr_img = batch
        opt_d, opt_g = self.optimizers()
        fake = self.generator(lr_img)

        real_logit, fake_logit = self.discriminator(hr_img), self.discriminator(fake.detach())
        loss_d = self.adversarial(real_logit, torch.full_like(real_logit, 0.9))
        loss_d = loss_d + self.adversarial(fake_logit, torch.zeros_like(fake_logit))
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        self._clip(self.discriminator.parameters())
        opt_d.step()

        logit = self.discriminator(fake)
        loss_g = self.content(fake, hr_img) + 1e-3 * self.adversarial(logit, torch.ones_like(logit))
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        self._clip(self.generator.parameters())
        opt_g.step()


def main(generator, discriminator, datamodule):
    cfg = dict(lr_g=1e-4, lr_d=1e-4, gradient_clip_val=1.0)
    model = SatelliteSRGAN(generator, discriminator, cfg)
    pl.Trainer(max_epochs=100, accelerator="cuda", devices=1, precision="16-mixed").fit(model, datamodule)
