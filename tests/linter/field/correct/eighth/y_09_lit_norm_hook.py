# why correct: Lightning unscales before on_before_optimizer_step and before its own clipping, so the norm logged there is of true gradients; Lightning's checkpoint keeps the scaler.
import pytorch_lightning as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.cli import LightningCLI
from torch.utils.data import DataLoader

from birdsong.data import Clips


class SpecEncoder(nn.Module):
    def __init__(self, dim=384, depth=6, heads=6, patch=16, mels=128):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, patch, stride=patch)
        self.row = nn.Parameter(torch.randn(1, dim, mels // patch, 1) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, heads, dim * 4, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(dim))

    def forward(self, spec):
        x = self.patch(spec) + self.row
        return self.body(x.flatten(2).transpose(1, 2)).mean(1)


class BirdModel(pl.LightningModule):
    def __init__(self, classes: int = 264, lr: float = 3e-4, warmup: int = 1000, log_norm_every: int = 50):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = SpecEncoder()
        self.head = nn.Linear(384, classes)

    def forward(self, spec):
        return self.head(self.encoder(spec))

    def _loss(self, batch):
        spec, multi_hot = batch
        logits = self(spec)
        return F.binary_cross_entropy_with_logits(logits, multi_hot), logits

    def training_step(self, batch, _):
        loss, _ = self._loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, _):
        loss, logits = self._loss(batch)
        top1 = batch[1].gather(1, logits.argmax(1, keepdim=True)).float().mean()
        self.log_dict({"val/loss": loss, "val/top1": top1}, prog_bar=True, sync_dist=True)

    def on_before_optimizer_step(self, optimizer):
        if self.global_step % self.hparams.log_norm_every:
            return
        norms = [p.grad.detach().norm() for p in self.parameters() if p.grad is not None]
        self.log("train/grad_norm", torch.stack(norms).norm())

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.05)
        warm = self.hparams.warmup
        sch = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / warm) / max(1.0, (s / warm) ** 0.5))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sch, "interval": "step"}}


class BirdData(pl.LightningDataModule):
    def __init__(self, root: str = "birds", batch: int = 64):
        super().__init__()
        self.root, self.batch = root, batch

    def train_dataloader(self):
        return DataLoader(Clips(self.root, "train"), self.batch, shuffle=True, num_workers=12, drop_last=True)

    def val_dataloader(self):
        return DataLoader(Clips(self.root, "val"), self.batch, num_workers=12)


if __name__ == "__main__":
    LightningCLI(
        BirdModel,
        BirdData,
        trainer_defaults=dict(
            precision=16,
            accelerator="gpu",
            max_epochs=50,
            gradient_clip_val=1.0,
            accumulate_grad_batches=2,
            callbacks=[LearningRateMonitor("step"), ModelCheckpoint(monitor="val/top1", mode="max", save_last=True)],
        ),
        seed_everything_default=5,
    )
