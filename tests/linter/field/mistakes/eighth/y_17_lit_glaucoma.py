# source: https://github.com/microsoft/InnerEye-DeepLearning/issues/401
# mistake: the Lightning module applies BCELoss to sigmoid outputs while the Trainer runs with precision=16, where binary_cross_entropy is unsafe to autocast and raises.
# severity: error
import os
from argparse import ArgumentParser

import pytorch_lightning as pl
import torch
import torch.nn as nn
import torchmetrics
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch.utils.data import DataLoader
from torchvision.models import densenet121

from fundus import FundusSet


class GlaucomaClassifier(pl.LightningModule):
    def __init__(self, lr=1e-4, weight_decay=1e-5, max_epochs=50):
        super().__init__()
        self.save_hyperparameters()
        net = densenet121(pretrained=True)
        net.classifier = nn.Sequential(nn.Dropout(0.3), nn.Linear(1024, 1), nn.Sigmoid())
        self.net = net
        self.criterion = nn.BCELoss()  # <- here
        self.auc = torchmetrics.AUROC(task="binary")

    def forward(self, x):
        return self.net(x).squeeze(1)

    def shared(self, batch):
        image, label = batch
        prob = self(image)
        return self.criterion(prob, label.to(prob.dtype)), prob, label  # <- here

    def training_step(self, batch, batch_idx):
        loss, _, _ = self.shared(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, prob, label = self.shared(batch)
        self.auc.update(prob, label.int())
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_auc", self.auc, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
        sch = torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.hparams.max_epochs)
        return [opt], [sch]


class FundusData(pl.LightningDataModule):
    def __init__(self, root, batch):
        super().__init__()
        self.root, self.batch = root, batch

    def train_dataloader(self):
        return DataLoader(FundusSet(self.root, "train"), self.batch, shuffle=True, num_workers=8, pin_memory=True)

    def val_dataloader(self):
        return DataLoader(FundusSet(self.root, "val"), self.batch, num_workers=8, pin_memory=True)


def cli():
    parser = ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--logdir", default="logs")
    args = parser.parse_args()

    pl.seed_everything(7)
    model = GlaucomaClassifier(max_epochs=args.epochs)
    trainer = pl.Trainer(
        gpus=1,
        precision=16,  # <- here
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        default_root_dir=args.logdir,
        callbacks=[
            ModelCheckpoint(os.path.join(args.logdir, "best"), monitor="val_auc", mode="max"),
            EarlyStopping("val_auc", mode="max", patience=8),
            LearningRateMonitor(),
        ],
    )
    trainer.fit(model, datamodule=FundusData(args.root, args.batch))


if __name__ == "__main__":
    cli()
