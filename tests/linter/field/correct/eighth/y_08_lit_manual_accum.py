# why correct: manual optimization calls manual_backward with the loss divided by the accumulation count, clips right before each step, and bf16-mixed has no scaler whose factor could be in the gradients.
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from colour.data import GreyColour
from colour.nets import PatchCritic, ResUNet


class Colouriser(pl.LightningModule):
    def __init__(self, lr=2e-4, accumulate=4, l1=100.0, clip=1.0):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.painter = ResUNet(1, 2)
        self.critic = PatchCritic(3)

    def forward(self, grey):
        return self.painter(grey)

    @staticmethod
    def adversarial(logits, real):
        target = torch.ones_like(logits) if real else torch.zeros_like(logits)
        return F.binary_cross_entropy_with_logits(logits, target)

    def training_step(self, batch, batch_idx):
        grey, ab = batch
        opt_p, opt_c = self.optimizers()
        n = self.hparams.accumulate
        flush = (batch_idx + 1) % n == 0 or self.trainer.is_last_batch

        self.toggle_optimizer(opt_p)
        fake = self(grey)
        loss_p = self.adversarial(self.critic(torch.cat([grey, fake], 1)), True)
        loss_p = loss_p + self.hparams.l1 * F.l1_loss(fake, ab)
        self.manual_backward(loss_p / n)
        if flush:
            self.clip_gradients(opt_p, gradient_clip_val=self.hparams.clip, gradient_clip_algorithm="norm")
            opt_p.step()
            opt_p.zero_grad()
        self.untoggle_optimizer(opt_p)

        self.toggle_optimizer(opt_c)
        real_score = self.critic(torch.cat([grey, ab], 1))
        fake_score = self.critic(torch.cat([grey, fake.detach()], 1))
        loss_c = 0.5 * (self.adversarial(real_score, True) + self.adversarial(fake_score, False))
        self.manual_backward(loss_c / n)
        if flush:
            self.clip_gradients(opt_c, gradient_clip_val=self.hparams.clip, gradient_clip_algorithm="norm")
            opt_c.step()
            opt_c.zero_grad()
        self.untoggle_optimizer(opt_c)
        self.log_dict({"painter": loss_p, "critic": loss_c}, prog_bar=True)

    def on_train_epoch_end(self):
        for s in self.lr_schedulers():
            s.step()

    def validation_step(self, batch, batch_idx):
        grey, ab = batch
        self.log("val_l1", F.l1_loss(self(grey).float(), ab), prog_bar=True)

    def configure_optimizers(self):
        o = [torch.optim.Adam(m.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999)) for m in (self.painter, self.critic)]
        s = [torch.optim.lr_scheduler.ExponentialLR(x, 0.97) for x in o]
        return o, s


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    train = DataLoader(GreyColour("places/train"), 16, shuffle=True, num_workers=8, drop_last=True)
    valid = DataLoader(GreyColour("places/val"), 32, num_workers=8)
    trainer = pl.Trainer(accelerator="gpu", devices=1, precision="bf16-mixed", max_epochs=30,
                         callbacks=[ModelCheckpoint(monitor="val_l1", save_last=True)])
    trainer.fit(Colouriser(), train, valid)
