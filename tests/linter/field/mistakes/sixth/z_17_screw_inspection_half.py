# source: Lightning-AI/pytorch-lightning issue #5140
# mistake: the module is cast to float16 and trained with native 16-bit mixed precision; its gradients are FP16 and the scaler raises "Attempting to unscale FP16 gradients."
# severity: error
import argparse

import pytorch_lightning as pl
import timm
import torch
from torch import nn
from torchmetrics.classification import BinaryF1Score


class ScrewNet(pl.LightningModule):
    def __init__(self, backbone="resnet18", lr=1e-3, classes=2):
        super().__init__()
        self.save_hyperparameters()
        self.net = timm.create_model(backbone, pretrained=True, num_classes=classes)
        self.loss = nn.CrossEntropyLoss()
        self.f1 = BinaryF1Score()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.f1(self(x).argmax(1), y)
        self.log("f1", self.f1, on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr, eps=1e-4)
        return {"optimizer": opt,
                "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.trainer.max_epochs)}}


def run_fold(fold, data, args):
    model = ScrewNet(args.backbone, args.lr)
    if args.fp16:
        model.half()  # <- here
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=args.epochs,
        precision="16-mixed" if args.fp16 else "32-true",  # <- here
        gradient_clip_val=1.0,
        logger=pl.loggers.CSVLogger("logs", name=f"fold{fold}"),
    )
    trainer.fit(model, data.train_dataloader(fold), data.val_dataloader(fold))  # <- here
    trainer.save_checkpoint(f"fold{fold}.ckpt")
    return trainer.callback_metrics["f1"].item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--backbone", default="resnet18")
    ap.add_argument("--folds", type=int, default=5)
    ap.add_argument("--size", type=int, default=224)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--fp16", action="store_true")
    args = ap.parse_args()
    from screws import ScrewData

    data = ScrewData("data/screws", folds=args.folds, size=args.size, batch_size=32)
    scores = [run_fold(k, data, args) for k in range(args.folds)]
    print("mean f1", sum(scores) / len(scores))


if __name__ == "__main__":
    main()
