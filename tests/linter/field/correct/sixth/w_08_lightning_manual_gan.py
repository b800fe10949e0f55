# why correct: with manual optimization all backward calls go through self.manual_backward, which scales, and the LightningOptimizer's step unscales and skips on overflow
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn


class Coder(nn.Module):
    def __init__(self, ch=64, latent=8):
        super().__init__()
        self.enc = nn.Sequential(
            nn.Conv2d(3, ch, 4, 2, 1), nn.SiLU(), nn.Conv2d(ch, 2 * ch, 4, 2, 1), nn.SiLU(),
            nn.Conv2d(2 * ch, 2 * latent, 1))
        self.dec = nn.Sequential(
            nn.Conv2d(latent, 2 * ch, 1), nn.SiLU(), nn.ConvTranspose2d(2 * ch, ch, 4, 2, 1), nn.SiLU(),
            nn.ConvTranspose2d(ch, 3, 4, 2, 1))

    def forward(self, x):
        mu, logvar = self.enc(x).float().chunk(2, 1)
        logvar = logvar.clamp(-20, 10)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        kl = 0.5 * (mu.square() + logvar.exp() - 1 - logvar).mean()
        return self.dec(z), kl


class PatchCritic(nn.Sequential):
    def __init__(self, ch=64):
        super().__init__(nn.Conv2d(3, ch, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(ch, 2 * ch, 4, 2, 1),
                         nn.LeakyReLU(0.2), nn.Conv2d(2 * ch, 1, 3, 1, 1))


class AdversarialCoder(pl.LightningModule):
    def __init__(self, lr=2e-4, start=5000, w_adv=0.1, w_kl=1e-6):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.coder = Coder()
        self.critic = PatchCritic()

    def training_step(self, batch, _):
        opt_c, opt_d = self.optimizers()
        adversarial = self.global_step // 2 >= self.hparams.start

        self.toggle_optimizer(opt_c)
        rec, kl = self.coder(batch)
        loss = F.l1_loss(rec.float(), batch.float()) + self.hparams.w_kl * kl
        if adversarial:
            loss = loss - self.hparams.w_adv * self.critic(rec).float().mean()
        opt_c.zero_grad()
        self.manual_backward(loss)
        opt_c.step()
        self.untoggle_optimizer(opt_c)

        self.toggle_optimizer(opt_d)
        on_real = self.critic(batch).float()
        on_fake = self.critic(rec.detach()).float()
        d_loss = 0.5 * (F.relu(1 - on_real).mean() + F.relu(1 + on_fake).mean())
        opt_d.zero_grad()
        self.manual_backward(d_loss if adversarial else 0.0 * d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.log_dict({"loss/rec": loss.detach(), "loss/d": d_loss.detach()}, prog_bar=True)

    def on_train_epoch_end(self):
        for sch in self.lr_schedulers():
            sch.step()

    def configure_optimizers(self):
        a = torch.optim.Adam(self.coder.parameters(), self.hparams.lr, betas=(0.5, 0.9))
        b = torch.optim.Adam(self.critic.parameters(), self.hparams.lr, betas=(0.5, 0.9))
        step = torch.optim.lr_scheduler.StepLR
        return [a, b], [step(a, 30), step(b, 30)]


if __name__ == "__main__":
    from mydata import Tiles

    pl.seed_everything(5)
    trainer = pl.Trainer(precision="16-mixed", devices=1, max_epochs=90)
    trainer.fit(AdversarialCoder(), datamodule=Tiles(batch_size=32))
