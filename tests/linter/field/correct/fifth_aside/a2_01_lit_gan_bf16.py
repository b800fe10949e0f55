# why correct: precision "bf16-mixed" uses no loss scaling in Lightning, so clip_gradients right after manual_backward sees true gradients
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn


def hinge_d(real, fake):
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


class Inpainter(pl.LightningModule):
    def __init__(self, generator: nn.Module, critic: nn.Module, clip: float = 0.5, start_adv: int = 2000):
        super().__init__()
        self.save_hyperparameters(ignore=["generator", "critic"])
        self.automatic_optimization = False
        self.generator, self.critic = generator, critic

    def _descend(self, optimizer, loss):
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=self.hparams.clip, gradient_clip_algorithm="norm")
        optimizer.step()

    def training_step(self, batch, _):
        image, hole = batch["image"], batch["hole"]
        g_opt, c_opt = self.optimizers()
        adv_on = self.global_step > self.hparams.start_adv

        self.toggle_optimizer(g_opt)
        filled = self.generator(torch.cat([image * (1 - hole), hole], 1))
        rec = F.l1_loss(filled.float(), image.float())
        g_loss = rec
        if adv_on:
            g_loss = g_loss - 0.05 * self.critic(filled).float().mean()
        self._descend(g_opt, g_loss)
        self.untoggle_optimizer(g_opt)

        if adv_on:
            self.toggle_optimizer(c_opt)
            c_loss = hinge_d(self.critic(image).float(), self.critic(filled.detach()).float())
            self._descend(c_opt, c_loss)
            self.untoggle_optimizer(c_opt)
            self.log("critic", c_loss.detach())
        self.log("rec", rec.detach(), prog_bar=True)

    def validation_step(self, batch, _):
        image, hole = batch["image"], batch["hole"]
        filled = self.generator(torch.cat([image * (1 - hole), hole], 1))
        self.log("val_l1", F.l1_loss(filled.float(), image.float()), sync_dist=True)

    def configure_optimizers(self):
        return [
            torch.optim.AdamW(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.99)),
            torch.optim.AdamW(self.critic.parameters(), lr=4e-4, betas=(0.5, 0.99)),
        ]


def fit(generator, critic, dm):
    trainer = pl.Trainer(accelerator="gpu", devices=4, strategy="ddp_find_unused_parameters_true",
                         precision="bf16-mixed", max_steps=300_000, val_check_interval=2000)
    trainer.fit(Inpainter(generator, critic), datamodule=dm)
