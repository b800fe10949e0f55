import torch
from torch import nn


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(65, 4)

    def forward(self, wave):
        power = torch.stft(wave, 128, window=torch.hann_window(128), return_complex=True).abs() ** 2
        return self.head(torch.log(power + 1e-6).mean(-1))


def get_model():
    return Spectrum()


def example_inputs():
    return torch.randn(2, 1024)
