# why correct: binary_cross_entropy on probabilities runs with autocast switched off and on float32 inputs, the one place where the model truly yields probabilities (a noisy-or)
import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F


class NoisyOr(nn.Module):
    """Bag probability from instance logits: 1 - prod(1 - p)."""

    def forward(self, logits, mask):
        log_absent = F.logsigmoid(-logits.float()) * mask
        return -torch.expm1(log_absent.sum(dim=1))


class SoundEventBags(L.LightningModule):
    def __init__(self, mels=64, events=10, width=256, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.frames = nn.Sequential(
            nn.Conv1d(mels, width, 5, padding=2), nn.GELU(), nn.Conv1d(width, width, 5, padding=2), nn.GELU()
        )
        self.events = nn.Linear(width, events)
        self.pool = NoisyOr()

    def forward(self, mel):
        return self.events(self.frames(mel).transpose(1, 2))

    def bag_loss(self, logits, mask, tags):
        with torch.autocast(device_type=self.device.type, enabled=False):
            p = self.pool(logits, mask.unsqueeze(-1).float())
            p = p.clamp(1e-6, 1 - 1e-6)
            return F.binary_cross_entropy(p, tags.float())

    def training_step(self, batch, _):
        mel, mask, tags = batch
        loss = self.bag_loss(self(mel), mask, tags)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        mel, mask, tags = batch
        self.log("val_loss", self.bag_loss(self(mel), mask, tags), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main(train_loader, val_loader):
    trainer = L.Trainer(accelerator="gpu", devices=1, precision="16-mixed", max_epochs=40, gradient_clip_val=5.0)
    trainer.fit(SoundEventBags(), train_loader, val_loader)
