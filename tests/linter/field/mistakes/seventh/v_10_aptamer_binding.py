# source: gc-os-ai/pyaptamer issue #230 https://github.com/gc-os-ai/pyaptamer/issues/230
# mistake: the Lightning module ends in a sigmoid and uses binary_cross_entropy while training in 16-mixed: autocast refuses that loss
# severity: error
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader


class PairInteraction(nn.Module):
    def __init__(self, vocab_rna=130, vocab_protein=720, dim=128):
        super().__init__()
        self.rna = nn.Embedding(vocab_rna, dim, padding_idx=0)
        self.protein = nn.Embedding(vocab_protein, dim, padding_idx=0)
        enc = nn.TransformerEncoderLayer(dim, 8, 512, batch_first=True)
        self.enc_r = nn.TransformerEncoder(enc, 3)
        self.enc_p = nn.TransformerEncoder(enc, 3)
        self.conv = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.GELU(), nn.AdaptiveMaxPool2d(8)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 64, 256), nn.GELU(), nn.Linear(256, 1), nn.Sigmoid())

    def forward(self, r, p):
        a = self.enc_r(self.rna(r))
        b = self.enc_p(self.protein(p))
        grid = torch.bmm(a, b.transpose(1, 2)).unsqueeze(1)
        return self.head(self.conv(grid)).squeeze(-1)


class BindingModule(L.LightningModule):
    def __init__(self, lr=1e-5, wd=1e-5):
        super().__init__()
        self.save_hyperparameters()
        self.net = PairInteraction()

    def _shared(self, batch, stage):
        r, p, y = batch
        prob = self.net(r, p)
        loss = F.binary_cross_entropy(prob, y.float())  # <- here
        acc = ((prob > 0.5) == y.bool()).float().mean()
        self.log_dict({f"{stage}_loss": loss, f"{stage}_acc": acc}, prog_bar=True, on_epoch=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self._shared(batch, "train")

    def validation_step(self, batch, batch_idx):
        self._shared(batch, "val")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.wd)


def main():
    from apta_data import PairSet

    L.seed_everything(3)
    train = DataLoader(PairSet("train"), batch_size=16, shuffle=True, num_workers=4)
    val = DataLoader(PairSet("val"), batch_size=32)
    trainer = L.Trainer(accelerator="gpu", devices=1, precision="16-mixed", max_epochs=200, gradient_clip_val=1.0)  # <- here
    trainer.fit(BindingModule(), train, val)


if __name__ == "__main__":
    main()
