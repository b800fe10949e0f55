# why correct: manual_backward and the wrapped optimizers let Lightning's precision plugin scale and unscale; no clipping is done by hand
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn


def mlp(*sizes, last=None):
    mods = []
    for i, (a, b) in enumerate(zip(sizes, sizes[1:])):
        mods.append(nn.Linear(a, b))
        if i < len(sizes) - 2:
            mods.append(nn.LeakyReLU(0.2))
    return nn.Sequential(*mods, *([last] if last else []))


class TrajectoryGAN(pl.LightningModule):
    def __init__(self, z=32, length=40, lr=2e-4, d_every=2):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.gen = mlp(z, 256, 512, length * 2, last=nn.Tanh())
        self.dis = mlp(length * 2, 512, 256, 1)

    def sample(self, n):
        return self.gen(torch.randn(n, self.hparams.z, device=self.device))

    def configure_optimizers(self):
        lr = self.hparams.lr
        return (
            torch.optim.Adam(self.gen.parameters(), lr=lr, betas=(0.5, 0.99)),
            torch.optim.Adam(self.dis.parameters(), lr=lr, betas=(0.5, 0.99)),
        )

    def training_step(self, batch, batch_idx):
        g_opt, d_opt = self.optimizers()
        real = batch.flatten(1)

        if batch_idx % self.hparams.d_every == 0:
            self.toggle_optimizer(d_opt)
            fake = self.sample(len(real)).detach()
            d_loss = F.softplus(-self.dis(real)).mean() + F.softplus(self.dis(fake)).mean()
            d_opt.zero_grad()
            self.manual_backward(d_loss)
            d_opt.step()
            self.untoggle_optimizer(d_opt)
            self.log("d", d_loss, prog_bar=True)

        self.toggle_optimizer(g_opt)
        g_loss = F.softplus(-self.dis(self.sample(len(real)))).mean()
        g_opt.zero_grad()
        self.manual_backward(g_loss)
        g_opt.step()
        self.untoggle_optimizer(g_opt)
        self.log("g", g_loss, prog_bar=True)


def cli():
    from pedestrians import TrackData

    trainer = pl.Trainer(accelerator="gpu", devices=1, precision="16-mixed", max_epochs=300, log_every_n_steps=20)
    trainer.fit(TrajectoryGAN(), TrackData(batch_size=512))
    trainer.save_checkpoint("tracks.ckpt")


if __name__ == "__main__":
    cli()
