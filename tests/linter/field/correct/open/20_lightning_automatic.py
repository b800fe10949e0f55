# style of: Lightning-AI/pytorch-lightning:docs/source-pytorch/common/precision_basic.rst
# torch: 2.1+
import lightning as L
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class LitRegressor(L.LightningModule):
    def __init__(self, width=256, lr=3e-4, total_steps=1000):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(20, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.smooth_l1_loss(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        pred = self(x).float()
        rel = ((pred - y).abs() / (y.abs() + 1e-8)).mean()
        self.log_dict({"val_loss": F.mse_loss(pred, y), "val_rel": rel})

    def on_before_optimizer_step(self, optimizer):
        # the precision plugin has unscaled the gradients by the time this hook runs
        norms = [p.grad.detach().norm(2) for p in self.parameters() if p.grad is not None]
        self.log("grad_norm", torch.stack(norms).norm(2))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr, total_steps=self.hparams.total_steps
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    x = torch.randn(4096, 20)
    data = TensorDataset(x, x.square().sum(1, keepdim=True))
    model = LitRegressor(total_steps=16 * 5)
    trainer = L.Trainer(
        max_epochs=5,
        accelerator="gpu",
        devices=1,
        precision="16-mixed",
        gradient_clip_val=1.0,
        accumulate_grad_batches=4,
    )
    trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True), DataLoader(data, batch_size=256))


if __name__ == "__main__":
    main()
