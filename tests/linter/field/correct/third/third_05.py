import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class VQEncoder(pl.LightningModule):
    def __init__(self, dim=64, codes=512, lr=3e-4, accum=4):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.enc = nn.Sequential(nn.Conv2d(3, dim, 4, 2, 1), nn.ReLU(), nn.Conv2d(dim, dim, 4, 2, 1))
        self.dec = nn.Sequential(nn.ConvTranspose2d(dim, dim, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(dim, 3, 4, 2, 1))
        self.codebook = nn.Embedding(codes, dim)

    def quantize(self, h):
        with torch.autocast(device_type=self.device.type, enabled=False):
            flat = h.float().permute(0, 2, 3, 1)
            dist = torch.cdist(flat.flatten(0, 2), self.codebook.weight.float())
            q = self.codebook(dist.argmin(-1)).view_as(flat)
            commit = F.mse_loss(flat, q.detach()) * 0.25 + F.mse_loss(q, flat.detach())
            return (flat + (q - flat).detach()).permute(0, 3, 1, 2), commit

    def forward(self, x):
        q, commit = self.quantize(self.enc(x))
        return self.dec(q), commit

    def training_step(self, batch, batch_idx):
        x, _ = batch
        opt = self.optimizers()
        recon, commit = self(x)
        loss = F.mse_loss(recon.float(), x) + commit
        self.manual_backward(loss / self.hparams.accum)
        if (batch_idx + 1) % self.hparams.accum == 0:
            opt.step()
            opt.zero_grad()
            self.lr_schedulers().step()
        self.log("loss", loss, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        self.log("val_mse", F.mse_loss(self(x)[0].float(), x))

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10_000)]


def main():
    train = datasets.CIFAR10("data", transform=transforms.ToTensor(), download=True)
    val = datasets.CIFAR10("data", train=False, transform=transforms.ToTensor())
    trainer = pl.Trainer(max_epochs=40, accelerator="gpu", devices=1, precision="bf16-mixed")
    trainer.fit(
        VQEncoder(),
        DataLoader(train, 125, shuffle=True, num_workers=4),
        DataLoader(val, 256, num_workers=4),
    )


if __name__ == "__main__":
    main()
