"""
# source: https://github.com/gc-os-ai/pyaptamer/issues/230
# mistake: the module applies F.binary_cross_entropy to probabilities while the trainer runs with 16-mixed precision; under autocast on CUDA this raises RuntimeError.
# severity: error
# torch: any (CUDA)
"""
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAccuracy


class PairEncoder(nn.Module):
    def __init__(self, n_apta=128, n_prot=256, dim=128):
        super().__init__()
        self.apta = nn.Sequential(nn.Embedding(n_apta, dim), nn.TransformerEncoderLayer(dim, 4, batch_first=True))
        self.prot = nn.Sequential(nn.Embedding(n_prot, dim), nn.TransformerEncoderLayer(dim, 4, batch_first=True))
        self.head = nn.Sequential(nn.Linear(2 * dim, dim), nn.GELU(), nn.Linear(dim, 1))

    def forward(self, apta, prot):
        pair = torch.cat([self.apta(apta).mean(1), self.prot(prot).mean(1)], dim=-1)
        return torch.sigmoid(self.head(pair))


class BindingClassifier(L.LightningModule):
    def __init__(self, model: nn.Module, lr: float = 1e-5, betas=(0.9, 0.999)):
        super().__init__()
        self.model = model
        self.lr, self.betas = lr, betas
        self.accuracy = BinaryAccuracy()

    def _step(self, batch, prefix: str):
        apta, prot, y = batch
        y_hat = self.model(apta, prot).squeeze(-1)
        loss = F.binary_cross_entropy(y_hat, y.float())  # <- here
        self.log(f"{prefix}_loss", loss, prog_bar=True)
        self.log(f"{prefix}_acc", self.accuracy(y_hat, y.int()))
        return loss

    def training_step(self, batch, batch_idx):
        return self._step(batch, "train")

    def validation_step(self, batch, batch_idx):
        return self._step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr, betas=self.betas)


def random_pairs(n):
    return TensorDataset(torch.randint(0, 128, (n, 40)), torch.randint(0, 256, (n, 120)), torch.randint(0, 2, (n,)))


if __name__ == "__main__":
    L.seed_everything(7)
    trainer = L.Trainer(accelerator="gpu", devices=1, precision="16-mixed", max_epochs=20, gradient_clip_val=1.0)
    trainer.fit(
        BindingClassifier(PairEncoder()),
        DataLoader(random_pairs(4096), batch_size=64, shuffle=True),
        DataLoader(random_pairs(512), batch_size=64),
    )
