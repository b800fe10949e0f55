import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.lstm = nn.LSTM(16, 32, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(64, 5)

    def forward(self, ids):
        states, _ = self.lstm(self.embedding(ids))
        return self.head(states)


def get_model():
    return Tagger()


def example_inputs():
    return torch.randint(0, 100, (2, 12))
