# why correct: gradients are looked at in on_before_optimizer_step and clipped in configure_gradient_clipping, both of which Lightning calls after unscaling
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, random_split

from spectra.catalogue import SpectraSet


class GradientWatch(Callback):
    def __init__(self, every=50):
        self.every = every

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step % self.every:
            return
        groups = {}
        for name, p in module.named_parameters():
            if p.grad is not None:
                groups.setdefault(name.split(".")[0], []).append(p.grad.detach().norm())
        module.log_dict({f"grad/{k}": torch.stack(v).norm() for k, v in groups.items()})


class StellarParameters(pl.LightningModule):
    """Temperature, gravity and metallicity with their uncertainties."""

    def __init__(self, width=128, depth=8, lr=1e-3, clip_after=500):
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Conv1d(1, width, 11, 4, 5)
        self.trunk = nn.Sequential(
            *[
                nn.Sequential(nn.Conv1d(width, width, 5, 1 + i % 2, 2), nn.BatchNorm1d(width), nn.SiLU())
                for i in range(depth)
            ]
        )
        self.head = nn.Linear(width, 6)

    def forward(self, flux):
        h = self.trunk(self.stem(flux.unsqueeze(1))).mean(-1)
        return self.head(h).float().chunk(2, -1)

    def nll(self, batch):
        flux, truth = batch
        mean, log_var = self(flux)
        log_var = log_var.clamp(-8, 8)
        return 0.5 * ((truth - mean).square() * torch.exp(-log_var) + log_var).mean()

    def training_step(self, batch, batch_idx):
        loss = self.nll(batch)
        self.log("train_nll", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_nll", self.nll(batch), prog_bar=True)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.global_step < self.hparams.clip_after:
            return
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=1e-2)
        plan = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plan, "monitor": "val_nll"}}


def main():
    pl.seed_everything(5)
    data = SpectraSet("dr17.h5")
    train, valid = random_split(data, [len(data) - 20_000, 20_000])
    trainer = pl.Trainer(
        precision="16-mixed",
        accelerator="gpu",
        devices=2,
        strategy="ddp",
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        max_epochs=80,
        callbacks=[GradientWatch(), LearningRateMonitor(), ModelCheckpoint(monitor="val_nll", save_last=True)],
    )
    trainer.fit(
        StellarParameters(),
        DataLoader(train, 256, shuffle=True, num_workers=6),
        DataLoader(valid, 512, num_workers=6),
        ckpt_path="last",
    )


if __name__ == "__main__":
    main()
