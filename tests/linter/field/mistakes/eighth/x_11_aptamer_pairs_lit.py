# source: gc-os-ai/pyaptamer issue #230
# mistake: BCELoss on sigmoid outputs is refused inside the autocast region that precision="16-mixed" opens around training_step
# severity: error
import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import BinaryAUROC

from binding.tables import PairTable


class SequenceTower(nn.Module):
    def __init__(self, alphabet, dim, depth):
        super().__init__()
        self.embed = nn.Embedding(alphabet + 1, dim, padding_idx=0)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth)

    def forward(self, ids):
        pad = ids == 0
        h = self.encoder(self.embed(ids), src_key_padding_mask=pad)
        h = h.masked_fill(pad[..., None], 0)
        return h.sum(1) / (~pad).sum(1, keepdim=True).clamp(min=1)


class BindingModel(L.LightningModule):
    def __init__(self, dim=128, depth=3, lr=1e-4):
        super().__init__()
        self.save_hyperparameters()
        self.rna = SequenceTower(4, dim, depth)
        self.protein = SequenceTower(20, dim, depth)
        self.head = nn.Sequential(
            nn.Linear(3 * dim, dim),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(dim, 1),
            nn.Sigmoid(),
        )
        self.loss = nn.BCELoss()  # <- here
        self.auroc = BinaryAUROC()

    def forward(self, rna, protein):
        a, b = self.rna(rna), self.protein(protein)
        return self.head(torch.cat([a, b, a * b], -1)).squeeze(-1)

    def training_step(self, batch, idx):
        prob = self(batch["rna"], batch["protein"])
        loss = self.loss(prob, batch["binds"].to(prob.dtype))  # <- here
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, idx):
        prob = self(batch["rna"], batch["protein"])
        self.auroc.update(prob.float(), batch["binds"].int())

    def on_validation_epoch_end(self):
        self.log("val_auroc", self.auroc.compute(), prog_bar=True)
        self.auroc.reset()

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.StepLR(opt, 10, 0.5)}


def main():
    L.seed_everything(3)
    train = DataLoader(PairTable("train"), 64, shuffle=True, num_workers=4)
    valid = DataLoader(PairTable("valid"), 128, num_workers=4)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision="16-mixed",  # <- here
        max_epochs=60,
        gradient_clip_val=1.0,
        callbacks=[EarlyStopping("val_auroc", mode="max", patience=8), ModelCheckpoint(monitor="val_auroc", mode="max")],
    )
    trainer.fit(BindingModel(), train, valid)


if __name__ == "__main__":
    main()
