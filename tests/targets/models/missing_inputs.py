from torch import nn


def get_model():
    return nn.Linear(16, 3)
