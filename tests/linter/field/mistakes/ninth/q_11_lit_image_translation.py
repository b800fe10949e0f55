# source: https://github.com/Lightning-AI/pytorch-lightning/issues/19695
# mistake: with manual optimization and 16-mixed precision the module calls loss.backward() instead of self.manual_backward(), so the loss is never scaled and the precision plugin fails at the step
# severity: error
import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F


class Generator(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 7, padding=3), nn.InstanceNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.InstanceNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 3, 7, padding=3), nn.Tanh(),
        )

    def forward(self, x):
        return self.net(x)


class Patch(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(6, width, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(width, width * 2, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(width * 2, 1, 4, 1, 1),
        )

    def forward(self, x, y):
        return self.net(torch.cat([x, y], 1))


class Translate(pl.LightningModule):
    def __init__(self, lr=2e-4, l1=100.0):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.gen = Generator()
        self.dis = Patch()

    @staticmethod
    def gan(score, real):
        target = torch.ones_like(score) if real else torch.zeros_like(score)
        return F.binary_cross_entropy_with_logits(score, target)

    def training_step(self, batch, _):
        x, y = batch
        og, od = self.optimizers()
        fake = self.gen(x)

        self.toggle_optimizer(od)
        loss_d = 0.5 * (self.gan(self.dis(x, y), True) + self.gan(self.dis(x, fake.detach()), False))
        od.zero_grad()
        loss_d.backward()  # <- here
        od.step()
        self.untoggle_optimizer(od)

        self.toggle_optimizer(og)
        loss_g = self.gan(self.dis(x, fake), True) + self.hparams.l1 * F.l1_loss(fake, y)
        og.zero_grad()
        loss_g.backward()  # <- here
        og.step()
        self.untoggle_optimizer(og)
        self.log_dict({"d": loss_d, "g": loss_g}, prog_bar=True)

    def configure_optimizers(self):
        og = torch.optim.Adam(self.gen.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        od = torch.optim.Adam(self.dis.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        return [og, od]


def main(datamodule):
    pl.seed_everything(7)
    trainer = pl.Trainer(accelerator="gpu", devices=1, precision="16-mixed", max_epochs=100)  # <- here
    trainer.fit(Translate(), datamodule=datamodule)
