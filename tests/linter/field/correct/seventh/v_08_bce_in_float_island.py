# why correct: BCE on probabilities runs with autocast switched off and float32 inputs, which is the documented way when a model must output probabilities
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


class SoftOr(nn.Module):
    """Combines instance probabilities into one bag probability (noisy-or)."""

    def forward(self, p):
        return 1 - (1 - p).clamp(min=1e-5).log().sum(1).exp()


class BagModel(L.LightningModule):
    def __init__(self, lr=2e-4):
        super().__init__()
        self.save_hyperparameters()
        self.patch = nn.Sequential(
            nn.Conv2d(3, 32, 5, 2), nn.ReLU(), nn.Conv2d(32, 64, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.score = nn.Linear(64, 1)
        self.pool = SoftOr()

    def forward(self, bags):
        b, n = bags.shape[:2]
        logits = self.score(self.patch(bags.flatten(0, 1))).view(b, n)
        return logits

    def bag_loss(self, logits, label):
        with torch.autocast(device_type=self.device.type, enabled=False):
            prob = self.pool(torch.sigmoid(logits.float()))
            prob = prob.clamp(1e-6, 1 - 1e-6)
            return F.binary_cross_entropy(prob, label.float()), prob

    def training_step(self, batch, _):
        bags, label = batch
        loss, prob = self.bag_loss(self(bags), label)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, _):
        bags, label = batch
        loss, prob = self.bag_loss(self(bags), label)
        self.log_dict({"val/loss": loss, "val/acc": ((prob > 0.5) == label.bool()).float().mean()})

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    from histology import BagData

    L.seed_everything(11)
    trainer = L.Trainer(accelerator="gpu", devices=1, precision="16-mixed", max_epochs=40, gradient_clip_val=0.5)
    trainer.fit(BagModel(), datamodule=BagData(bag=32, batch=4))
