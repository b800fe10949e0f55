# why correct: manual optimization goes through manual_backward and Lightning's wrapped optimizers, which scale, unscale and skip by themselves
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn

from codec.data import WaveModule


class Down(nn.Sequential):
    def __init__(self, i, o, r):
        super().__init__(nn.Conv1d(i, o, 2 * r, r, r // 2), nn.ELU(), nn.Conv1d(o, o, 3, padding=1), nn.ELU())


class Up(nn.Sequential):
    def __init__(self, i, o, r):
        super().__init__(nn.ConvTranspose1d(i, o, 2 * r, r, r // 2), nn.ELU(), nn.Conv1d(o, o, 3, padding=1), nn.ELU())


class Critic(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, width, 15, 4, 7), nn.LeakyReLU(0.2),
            nn.Conv1d(width, 4 * width, 41, 4, 20, groups=4), nn.LeakyReLU(0.2),
            nn.Conv1d(4 * width, 16 * width, 41, 4, 20, groups=16), nn.LeakyReLU(0.2),
            nn.Conv1d(16 * width, 1, 3, padding=1),
        )

    def forward(self, x):
        return self.net(x)


class WaveCodec(pl.LightningModule):
    def __init__(self, width=64, warmup=5000, lr=3e-4):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.enc = nn.Sequential(Down(1, width, 4), Down(width, 2 * width, 4), Down(2 * width, 4 * width, 8))
        self.dec = nn.Sequential(Up(4 * width, 2 * width, 8), Up(2 * width, width, 4), Up(width, width, 4))
        self.last = nn.Conv1d(width, 1, 7, padding=3)
        self.critic = Critic()

    def forward(self, wave):
        return torch.tanh(self.last(self.dec(self.enc(wave))))

    def spectral(self, a, b):
        total = 0.0
        with torch.autocast("cuda", enabled=False):
            for n in (512, 1024, 2048):
                window = torch.hann_window(n, device=a.device)
                sa, sb = (torch.stft(x.float().squeeze(1), n, n // 4, window=window, return_complex=True).abs() for x in (a, b))
                total = total + F.l1_loss((sa + 1e-5).log(), (sb + 1e-5).log())
        return total

    def training_step(self, wave, batch_idx):
        opt_g, opt_d = self.optimizers()
        adversarial = self.global_step > self.hparams.warmup

        if adversarial:
            self.toggle_optimizer(opt_d)
            fake = self(wave).detach()
            loss_d = F.relu(1 - self.critic(wave)).mean() + F.relu(1 + self.critic(fake)).mean()
            opt_d.zero_grad()
            self.manual_backward(loss_d)
            opt_d.step()
            self.untoggle_optimizer(opt_d)
            self.log("d", loss_d)

        self.toggle_optimizer(opt_g)
        rebuilt = self(wave)
        loss_g = self.spectral(rebuilt, wave) + F.l1_loss(rebuilt, wave)
        if adversarial:
            loss_g = loss_g - 0.1 * self.critic(rebuilt).mean()
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.log("g", loss_g, prog_bar=True)

    def configure_optimizers(self):
        g = [p for m in (self.enc, self.dec, self.last) for p in m.parameters()]
        return (
            torch.optim.AdamW(g, self.hparams.lr, betas=(0.8, 0.99)),
            torch.optim.AdamW(self.critic.parameters(), self.hparams.lr, betas=(0.8, 0.99)),
        )


if __name__ == "__main__":
    trainer = pl.Trainer(precision="16-mixed", accelerator="gpu", devices=1, max_steps=400_000)
    trainer.fit(WaveCodec(), WaveModule("speech", batch_size=32, seconds=1))
