# why correct: binary_cross_entropy needs probabilities here (noisy-or) and runs in a region without autocast on float32 values made from float32 logits
import lightning as L
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils.data import DataLoader

from mammo.bags import BagSet


class NoisyOrNet(L.LightningModule):
    """A breast is positive when at least one of its patches is."""

    def __init__(self, lr: float = 1e-4, floor: float = 1e-6):
        super().__init__()
        self.save_hyperparameters()
        body = torchvision.models.convnext_tiny(weights="DEFAULT")
        body.classifier[2] = nn.Linear(768, 1)
        self.body = body

    def forward(self, bags):
        b, n = bags.shape[:2]
        return self.body(bags.flatten(0, 1)).view(b, n)

    def bag_probability(self, logits, present):
        log_no = F.logsigmoid(-logits) * present
        return -torch.expm1(log_no.sum(-1))

    def training_step(self, batch, _):
        bags, present, label = batch
        logits = self(bags)
        with torch.autocast(self.device.type, enabled=False):
            prob = self.bag_probability(logits.float(), present.float())
            prob = prob.clamp(self.hparams.floor, 1 - self.hparams.floor)
            loss = F.binary_cross_entropy(prob, label.float())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        bags, present, label = batch
        logits = self(bags)
        prob = self.bag_probability(logits.float(), present.float())
        self.log("val_acc", ((prob > 0.5) == label.bool()).float().mean())

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.05)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.trainer.max_epochs)]


if __name__ == "__main__":
    L.seed_everything(11)
    trainer = L.Trainer(max_epochs=30, precision="16-mixed", accelerator="gpu", devices=1, gradient_clip_val=1.0)
    trainer.fit(
        NoisyOrNet(),
        DataLoader(BagSet("train"), 4, shuffle=True, num_workers=6),
        DataLoader(BagSet("valid"), 4, num_workers=6),
    )
