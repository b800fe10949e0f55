# why correct: in a Catalyst custom runner the engine owns precision and scaler, so the loss goes through engine.backward and the prepared optimizer is stepped and zeroed.
import os
from typing import Dict

import torch
from catalyst import dl, metrics
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import CIFAR10


class Encoder(nn.Module):
    def __init__(self, dim: int = 128):
        super().__init__()

        def block(a, b):
            return nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.SiLU())

        self.conv = nn.Sequential(block(3, 64), block(64, 128), block(128, 256))
        self.mu = nn.Linear(256 * 16, dim)
        self.logvar = nn.Linear(256 * 16, dim)

    def forward(self, x):
        h = self.conv(x).flatten(1)
        return self.mu(h), self.logvar(h)


class Decoder(nn.Module):
    def __init__(self, dim: int = 128):
        super().__init__()

        def block(a, b):
            return nn.Sequential(nn.ConvTranspose2d(a, b, 4, stride=2, padding=1), nn.BatchNorm2d(b), nn.SiLU())

        self.lin = nn.Linear(dim, 256 * 16)
        self.conv = nn.Sequential(block(256, 128), block(128, 64), nn.ConvTranspose2d(64, 3, 4, stride=2, padding=1))

    def forward(self, z):
        return self.conv(self.lin(z).view(-1, 256, 4, 4))


class VAE(nn.Module):
    def __init__(self, dim: int = 128):
        super().__init__()
        self.encoder, self.decoder = Encoder(dim), Decoder(dim)

    def forward(self, x):
        mu, logvar = self.encoder(x)
        mu, logvar = mu.float(), logvar.float().clamp(-10, 10)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp() if self.training else mu
        return self.decoder(z).float(), mu, logvar


class VAERunner(dl.Runner):
    def __init__(self, beta: float = 0.5):
        super().__init__()
        self.beta = beta

    def on_loader_start(self, runner):
        super().on_loader_start(runner)
        self.meters: Dict[str, metrics.AdditiveMetric] = {
            key: metrics.AdditiveMetric(compute_on_call=False) for key in ("loss", "rec", "kl")}

    def handle_batch(self, batch):
        x, _ = batch
        rec, mu, logvar = self.model(x)
        l_rec = F.mse_loss(rec, x, reduction="none").sum((1, 2, 3)).mean()
        l_kl = (-0.5 * (1 + logvar - mu.pow(2) - logvar.exp())).sum(1).mean()
        loss = l_rec + self.beta * l_kl
        self.batch_metrics.update({"loss": loss, "rec": l_rec, "kl": l_kl})
        for key, meter in self.meters.items():
            meter.update(self.batch_metrics[key].item(), len(x))

        if self.is_train_loader:
            self.engine.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def on_loader_end(self, runner):
        for key, meter in self.meters.items():
            self.loader_metrics[key] = meter.compute()[0]
        super().on_loader_end(runner)

    def predict_batch(self, batch):
        return self.model(batch[0].to(self.engine.device))[0].clamp(0, 1)


if __name__ == "__main__":
    tf = T.ToTensor()
    loaders = {
        "train": DataLoader(CIFAR10(os.getcwd(), train=True, download=True, transform=tf), 256, shuffle=True,
                            num_workers=4, drop_last=True),
        "valid": DataLoader(CIFAR10(os.getcwd(), train=False, download=True, transform=tf), 512, num_workers=4),
    }
    vae = VAE()
    VAERunner().train(
        engine=dl.GPUEngine(fp16=True),
        model=vae,
        optimizer=optim.Adam(vae.parameters(), lr=1e-3),
        loaders=loaders,
        num_epochs=40,
        logdir="./logs/vae",
        valid_loader="valid",
        valid_metric="loss",
        minimize_valid_metric=True,
        verbose=True,
    )
