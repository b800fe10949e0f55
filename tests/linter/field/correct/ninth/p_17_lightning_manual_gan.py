# why correct: manual optimization under "16-mixed" goes through manual_backward and the Lightning optimizers' step, which scale, unscale and update; no gradient is touched between
import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F


def up(a, b):
    return nn.Sequential(nn.ConvTranspose2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.ReLU(True))


def down(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.LeakyReLU(0.2, True))


class SketchGAN(pl.LightningModule):
    def __init__(self, z=128, lr=2e-4, ch=64):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.gen = nn.Sequential(nn.Linear(z, ch * 4 * 16), nn.Unflatten(1, (ch * 4, 4, 4)), up(ch * 4, ch * 2),
                                 up(ch * 2, ch), nn.ConvTranspose2d(ch, 1, 4, 2, 1), nn.Tanh())
        self.disc = nn.Sequential(down(1, ch), down(ch, ch * 2), down(ch * 2, ch * 4), nn.Flatten(),
                                  nn.Linear(ch * 4 * 16, 1))

    def forward(self, n):
        return self.gen(torch.randn(n, self.hparams.z, device=self.device))

    def bce(self, logits, value):
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))

    def training_step(self, batch, batch_idx):
        real, _ = batch
        opt_g, opt_d = self.optimizers()

        self.toggle_optimizer(opt_d)
        with torch.no_grad():
            fake = self(real.size(0))
        torch.clear_autocast_cache()
        d_loss = self.bce(self.disc(real), 0.9) + self.bce(self.disc(fake), 0.0)
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        torch.clear_autocast_cache()

        self.toggle_optimizer(opt_g)
        g_loss = self.bce(self.disc(self(real.size(0))), 1.0)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.log_dict({"g": g_loss, "d": d_loss}, prog_bar=True)

    def on_train_epoch_end(self):
        for s in self.lr_schedulers():
            s.step()

    def configure_optimizers(self):
        g = torch.optim.Adam(self.gen.parameters(), self.hparams.lr, betas=(0.5, 0.999))
        d = torch.optim.Adam(self.disc.parameters(), self.hparams.lr, betas=(0.5, 0.999))
        return [g, d], [torch.optim.lr_scheduler.StepLR(o, 20, 0.5) for o in (g, d)]


def main(loader):
    trainer = pl.Trainer(max_epochs=60, precision="16-mixed", accelerator="gpu", devices=1)
    trainer.fit(SketchGAN(), loader)


if __name__ == "__main__":
    from sketches import loader

    main(loader())
