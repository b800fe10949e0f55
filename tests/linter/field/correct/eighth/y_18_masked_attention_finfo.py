# why correct: the mask value is finfo(scores.dtype).min, which fits whatever type autocast chose, and the softmax is taken in float32.
import torch
import torch.nn as nn
import torch.nn.functional as F
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader

from routes.data import VehicleRouting, pad


class MaskedHeads(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, blocked):
        b, n, d = x.shape
        q, k, v = self.to_qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        scores = scores.masked_fill(blocked[:, None, None, :], torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, d))


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.a = MaskedHeads(dim, heads)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.f = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))

    def forward(self, x, blocked):
        x = x + self.a(self.n1(x), blocked)
        return x + self.f(self.n2(x))


class NextStop(LightningModule):
    def __init__(self, dim=128, heads=8, depth=6, lr=1e-4):
        super().__init__()
        self.save_hyperparameters()
        self.place = nn.Linear(4, dim)
        self.layers = nn.ModuleList([Layer(dim, heads) for _ in range(depth)])
        self.query = nn.Linear(dim, dim)

    def forward(self, nodes, current, padding, visited):
        x = self.place(nodes)
        for layer in self.layers:
            x = layer(x, padding)
        here = x[torch.arange(len(x), device=x.device), current]
        logits = torch.einsum("bd,bnd->bn", self.query(here), x).float() / x.shape[-1] ** 0.5
        return logits.masked_fill(padding | visited, -1e9)

    def training_step(self, batch, batch_idx):
        *inputs, target = batch
        loss = F.cross_entropy(self(*inputs), target)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        *inputs, target = batch
        logits = self(*inputs)
        self.log_dict({"val_loss": F.cross_entropy(logits, target),
                       "val_acc": (logits.argmax(-1) == target).float().mean()}, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Routes(LightningDataModule):
    def __init__(self, folder, batch=512):
        super().__init__()
        self.folder, self.batch = folder, batch

    def train_dataloader(self):
        return DataLoader(VehicleRouting(self.folder, "train"), self.batch, shuffle=True, collate_fn=pad)

    def val_dataloader(self):
        return DataLoader(VehicleRouting(self.folder, "val"), self.batch, collate_fn=pad)


if __name__ == "__main__":
    Trainer(gpus=1, precision=16, max_epochs=100, gradient_clip_val=1.0).fit(NextStop(), Routes("cvrp100"))
