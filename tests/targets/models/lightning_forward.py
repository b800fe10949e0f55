import lightning
import torch
from torch import nn


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(16, 3)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)


def get_model():
    return Classifier()


def example_inputs():
    return torch.randn(4, 16)
