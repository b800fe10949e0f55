# style of: pytorch/examples:time_sequence_prediction/train.py
# torch: any
import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 51)
        self.lstm2 = nn.LSTMCell(51, 51)
        self.linear = nn.Linear(51, 1)

    def forward(self, inp, future=0):
        outputs = []
        size = inp.size(0)
        h1, c1, h2, c2 = (torch.zeros(size, 51, dtype=inp.dtype) for _ in range(4))
        for step in inp.split(1, dim=1):
            h1, c1 = self.lstm1(step, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            output = self.linear(h2)
            outputs.append(output)
        for _ in range(future):
            h1, c1 = self.lstm1(output, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            output = self.linear(h2)
            outputs.append(output)
        return torch.cat(outputs, dim=1)


def waves(n=100, length=1000, period=20):
    shift = np.random.randint(-4 * period, 4 * period, n).reshape(n, 1)
    return np.sin((np.arange(length) + shift) / 1.0 / period).astype("float64")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=15)
    opt = parser.parse_args()
    np.random.seed(0)
    torch.manual_seed(0)
    data = waves()
    inputs, target = torch.from_numpy(data[3:, :-1]), torch.from_numpy(data[3:, 1:])
    test_inputs, test_target = torch.from_numpy(data[:3, :-1]), torch.from_numpy(data[:3, 1:])

    # full precision: the line search calls the closure many times
    seq = Sequence().double()
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(seq.parameters(), lr=0.8)

    for i in range(opt.steps):

        def closure():
            optimizer.zero_grad()
            loss = criterion(seq(inputs), target)
            print("loss:", loss.item())
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            pred = seq(test_inputs, future=1000)
            print("step", i, "test loss:", criterion(pred[:, :-1000], test_target).item())
