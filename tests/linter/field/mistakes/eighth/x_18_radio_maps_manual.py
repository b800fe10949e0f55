# source: Lightning-AI/pytorch-lightning issue #19695
# mistake: in manual optimization loss.backward() is called directly, so with 16-mixed the loss is never scaled and the optimizer step fails at unscaling
# severity: error
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from radio.maps import CoverageMaps


def block(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1), nn.BatchNorm2d(o), nn.LeakyReLU(0.1, inplace=True))


class Encoder(nn.Sequential):
    def __init__(self, inputs, width):
        super().__init__(block(inputs, width, 2), block(width, 2 * width, 2), block(2 * width, 4 * width, 2))


class Decoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(block(4 * width, 2 * width), block(2 * width, width))
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, z, size):
        h = F.interpolate(self.layers(z), size=size, mode="bilinear", align_corners=False)
        return self.last(h)


class RadioMapNet(pl.LightningModule):
    def __init__(self, width=48, lr=1e-3):
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters()
        self.encoder = Encoder(4, width)
        self.decoder = Decoder(width)
        self.probe = nn.Linear(4 * width, 3)

    def training_step(self, batch, batch_idx):
        opt_map, opt_probe = self.optimizers()
        city, coverage, antennas = batch

        z = self.encoder(city)
        loss_map = F.mse_loss(self.decoder(z, coverage.shape[-2:]), coverage)
        loss_probe = F.cross_entropy(self.probe(z.detach().mean((-2, -1))), antennas)
        opt_map.zero_grad()
        loss_map.backward()  # <- here
        opt_map.step()

        opt_probe.zero_grad()
        loss_probe.backward()  # <- here
        opt_probe.step()

        self.log_dict({"map": loss_map, "probe": loss_probe}, prog_bar=True)

    def on_train_epoch_end(self):
        for s in self.lr_schedulers():
            s.step()

    def validation_step(self, batch, batch_idx):
        city, coverage, _ = batch
        pred = self.decoder(self.encoder(city), coverage.shape[-2:])
        self.log("val_rmse", F.mse_loss(pred.float(), coverage).sqrt())

    def configure_optimizers(self):
        main = torch.optim.Adam([*self.encoder.parameters(), *self.decoder.parameters()], lr=self.hparams.lr)
        probe = torch.optim.Adam(self.probe.parameters(), lr=1e-3)
        return [main, probe], [torch.optim.lr_scheduler.StepLR(o, 15, 0.3) for o in (main, probe)]


if __name__ == "__main__":
    pl.seed_everything(0)
    trainer = pl.Trainer(max_epochs=60, accelerator="gpu", devices=1, precision="16-mixed")
    trainer.fit(
        RadioMapNet(),
        DataLoader(CoverageMaps("train"), 16, shuffle=True, num_workers=4),
        DataLoader(CoverageMaps("val"), 16, num_workers=4),
    )
