# source: gc-os-ai/pyaptamer issue #230 (also microsoft/InnerEye-DeepLearning issue #401)
# mistake: F.binary_cross_entropy on probabilities is called inside training_step under Lightning's 16-mixed autocast, which raises "unsafe to autocast"
# severity: error
import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchmetrics.classification import MultilabelAveragePrecision
from transformers import AutoModel, AutoTokenizer


class CommentModerator(L.LightningModule):
    def __init__(self, backbone: str, n_flags: int, lr: float = 2e-5):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = AutoModel.from_pretrained(backbone)
        self.flags = nn.Sequential(
            nn.Dropout(0.1),
            nn.Linear(self.encoder.config.hidden_size, n_flags),
            nn.Sigmoid(),
        )
        self.ap = MultilabelAveragePrecision(num_labels=n_flags)

    def forward(self, ids, mask):
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return self.flags(hidden[:, 0])

    def _loss(self, batch):
        probs = self(batch["input_ids"], batch["attention_mask"])
        weight = 1.0 + 4.0 * batch["flags"]
        return F.binary_cross_entropy(probs, batch["flags"], weight=weight), probs  # <- here

    def training_step(self, batch, batch_idx):
        loss, _ = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, probs = self._loss(batch)
        self.ap.update(probs.float(), batch["flags"].long())
        self.log("val/loss", loss, sync_dist=True)

    def on_validation_epoch_end(self):
        self.log("val/ap", self.ap.compute())
        self.ap.reset()

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.01)
        sched = torch.optim.lr_scheduler.OneCycleLR(
            opt, max_lr=self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def make_collate(name):
    tok = AutoTokenizer.from_pretrained(name)

    def collate(rows):
        enc = tok([r["text"] for r in rows], padding=True, truncation=True, return_tensors="pt")
        enc["flags"] = torch.tensor([r["flags"] for r in rows], dtype=torch.float32)
        return enc

    return collate


def main(train_rows, val_rows, name="roberta-base", n_flags=6):
    collate = make_collate(name)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision="16-mixed",  # <- here
        max_epochs=3,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(monitor="val/ap", mode="max")],
    )
    trainer.fit(
        CommentModerator(name, n_flags),
        DataLoader(train_rows, batch_size=32, shuffle=True, collate_fn=collate, num_workers=4),
        DataLoader(val_rows, batch_size=64, collate_fn=collate, num_workers=4),
    )
