import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states, _ = self.lstm(packed)
        return pad_packed_sequence(states, batch_first=True)[0]


def get_model():
    return Tagger()


def example_inputs():
    return torch.randn(3, 6, 8), torch.tensor([6, 4, 2])
