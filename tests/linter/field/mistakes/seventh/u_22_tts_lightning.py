# source: https://github.com/Lightning-AI/pytorch-lightning/issues/18740
# mistake: with manual optimization and precision 16-mixed, loss.backward() bypasses manual_backward's loss scaling although the precision plugin treats the gradients as scaled
# severity: error
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn


class VocoderModule(pl.LightningModule):
    def __init__(self, generator: nn.Module, discriminator: nn.Module, mel: nn.Module, lr: float = 2e-4):
        super().__init__()
        self.save_hyperparameters(ignore=["generator", "discriminator", "mel"])
        self.automatic_optimization = False
        self.generator = generator
        self.discriminator = discriminator
        self.mel = mel

    def forward(self, spec):
        return self.generator(spec)

    def _disc_loss(self, wav, wav_hat):
        real = self.discriminator(wav)
        fake = self.discriminator(wav_hat.detach())
        return ((1 - real.float()) ** 2).mean() + (fake.float() ** 2).mean()

    def _gen_loss(self, wav, wav_hat):
        adv = ((1 - self.discriminator(wav_hat).float()) ** 2).mean()
        mel = F.l1_loss(self.mel(wav_hat.float()), self.mel(wav.float()))
        self.log("train/mel", mel)
        return adv + 45.0 * mel

    def _optimize(self, optimizer, loss):
        optimizer.zero_grad()
        loss.backward()  # <- here
        optimizer.step()

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        spec, wav = batch
        wav_hat = self.generator(spec)

        self.toggle_optimizer(opt_d)
        d_loss = self._disc_loss(wav, wav_hat)
        self._optimize(opt_d, d_loss)
        self.untoggle_optimizer(opt_d)

        self.toggle_optimizer(opt_g)
        g_loss = self._gen_loss(wav, self.generator(spec))
        self._optimize(opt_g, g_loss)
        self.untoggle_optimizer(opt_g)

        self.log_dict({"train/g": g_loss, "train/d": d_loss}, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        spec, wav = batch
        self.log("val/mel", F.l1_loss(self.mel(self(spec).float()), self.mel(wav.float())), sync_dist=True)

    def configure_optimizers(self):
        g = torch.optim.AdamW(self.generator.parameters(), self.hparams.lr, betas=(0.8, 0.99))
        d = torch.optim.AdamW(self.discriminator.parameters(), self.hparams.lr, betas=(0.8, 0.99))
        return [g, d], []


def main(datamodule, generator, discriminator, mel):
    trainer = pl.Trainer(accelerator="gpu", devices=1, precision="16-mixed", max_steps=400_000, val_check_interval=2000)
    trainer.fit(VocoderModule(generator, discriminator, mel), datamodule=datamodule)
