"""
# style of: Lightning-AI/pytorch-lightning:src/lightning/pytorch/plugins/precision/amp.py (user side)
# correct: a GradScaler is made but never called here: it is handed to the MixedPrecision plugin, which scales, unscales, steps and updates.
# torch: 2.1+
"""
import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class WaveNetLite(nn.Module):
    def __init__(self, channels=32, layers=10):
        super().__init__()
        self.inp = nn.Conv1d(1, channels, 1)
        self.stack = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 3, padding=2**i, dilation=2**i) for i in range(layers))
        self.out = nn.Conv1d(channels, 1, 1)

    def forward(self, x):
        h = self.inp(x)
        for conv in self.stack:
            a, b = conv(h).chunk(2, dim=1)
            h = h + torch.tanh(a) * torch.sigmoid(b)
        return self.out(h)


def spectral_loss(pred, target, sizes=(256, 512)):
    pred, target = pred.float().squeeze(1), target.float().squeeze(1)
    loss = 0.0
    for n in sizes:
        window = torch.hann_window(n, device=pred.device)
        a = torch.stft(pred, n, window=window, return_complex=True).abs()
        b = torch.stft(target, n, window=window, return_complex=True).abs()
        loss = loss + F.l1_loss(torch.log(a + 1e-5), torch.log(b + 1e-5))
    return loss


class Denoiser(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = WaveNetLite()

    def training_step(self, batch, batch_idx):
        noisy, clean = batch
        pred = self.net(noisy)
        with torch.autocast(self.device.type, enabled=False):
            loss = F.l1_loss(pred.float(), clean.float()) + 0.1 * spectral_loss(pred, clean)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main():
    clean = torch.randn(256, 1, 8192)
    data = DataLoader(TensorDataset(clean + 0.1 * torch.randn_like(clean), clean), batch_size=8, shuffle=True)
    # a lower start and slower growth than the default: the spectra are large at first
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=4000)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=20,
        plugins=[MixedPrecision(precision="16-mixed", device="cuda", scaler=scaler)],
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(save_last=True), LearningRateMonitor()],
        num_sanity_val_steps=0,
    )
    trainer.fit(Denoiser(), data, ckpt_path=None)


if __name__ == "__main__":
    main()
