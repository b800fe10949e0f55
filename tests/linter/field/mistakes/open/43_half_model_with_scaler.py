# source: https://github.com/Lightning-AI/pytorch-lightning/issues/5140
# mistake: the model is converted by .half() and also trained with 16-mixed precision; the scaler refuses float16 gradients ("Attempting to unscale FP16 gradients").
# severity: error
# torch: any
import pytorch_lightning as pl
import torch
import torch.nn as nn
import torchvision


class ScrewClassifier(pl.LightningModule):
    def __init__(self, n_class=2, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = torchvision.models.resnet18(weights=None, num_classes=n_class)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def loaders(batch_size=32):
    tf = torchvision.transforms.ToTensor()
    train = torchvision.datasets.FakeData(512, (3, 224, 224), 2, transform=tf)
    val = torchvision.datasets.FakeData(128, (3, 224, 224), 2, transform=tf)
    make = torch.utils.data.DataLoader
    return make(train, batch_size, shuffle=True, num_workers=4), make(val, batch_size, num_workers=4)


def train():
    model = ScrewClassifier()
    model.half()  # <- here
    train_dl, val_dl = loaders()
    trainer = pl.Trainer(max_epochs=30, accelerator="gpu", devices=1, precision="16-mixed")
    trainer.fit(model, train_dl, val_dl)


if __name__ == "__main__":
    train()
