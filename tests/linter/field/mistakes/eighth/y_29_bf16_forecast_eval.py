# source: https://github.com/locuslab/open-unlearning/pull/156
# mistake: the outputs of a bfloat16 autocast region are turned into NumPy arrays without a cast, which raises "Got unsupported ScalarType BFloat16".
# severity: error
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader

from load.data import HourlyLoad


class PatchForecaster(nn.Module):
    def __init__(self, context=336, horizon=48, patch=24, dim=128, layers=3):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch, dim)
        self.pos = nn.Parameter(torch.zeros(1, context // patch, dim))
        layer = nn.TransformerEncoderLayer(dim, 8, 4 * dim, 0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(dim * (context // patch), horizon)

    def forward(self, x):
        mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
        z = ((x - mean) / std).unflatten(1, (-1, self.patch))
        z = self.body(self.embed(z) + self.pos).flatten(1)
        return self.head(z), mean, std


def amp_context(opt):
    return torch.autocast("cuda", dtype=torch.bfloat16, enabled=opt.bf16)


def train(opt, net, loader, optimizer):
    net.train()
    total = 0.0
    for past, future in loader:
        past, future = past.cuda(), future.cuda()
        with amp_context(opt):
            z, mean, std = net(past)
        loss = nn.functional.huber_loss(z.float(), (future - mean) / std)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def evaluate(opt, net, loader):
    net.eval()
    guess, truth = [], []
    with torch.no_grad():
        for past, future in loader:
            with amp_context(opt):
                z, mean, std = net(past.cuda())
            guess.append(z.cpu().numpy() * std.cpu().numpy() + mean.cpu().numpy())  # <- here
            truth.append(future.numpy())
    guess, truth = np.concatenate(guess), np.concatenate(truth)
    err = guess - truth
    return {"mae": float(np.abs(err).mean()), "rmse": math.sqrt(float((err ** 2).mean())),
            "mape": float((np.abs(err) / np.maximum(np.abs(truth), 1e-3)).mean())}


def main(path):
    with open(path) as fh:
        opt = SimpleNamespace(**{**dict(bf16=True, lr=1e-3, epochs=20, batch=256), **json.load(fh)})
    torch.manual_seed(0)
    sets = {k: HourlyLoad(opt.csv, k, 336, 48) for k in ("train", "valid", "test")}
    loaders = {k: DataLoader(s, opt.batch, shuffle=k == "train", num_workers=4) for k, s in sets.items()}
    net = PatchForecaster().cuda()
    optimizer = optim.AdamW(net.parameters(), lr=opt.lr)
    plan = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    best = None
    for epoch in range(opt.epochs):
        loss = train(opt, net, loaders["train"], optimizer)
        scores = evaluate(opt, net, loaders["valid"])
        plan.step()
        print(epoch, f"{loss:.4f}", scores)
        if best is None or scores["mae"] < best:
            best = scores["mae"]
            torch.save(net.state_dict(), "forecaster.pt")
    net.load_state_dict(torch.load("forecaster.pt"))
    print("test", evaluate(opt, net, loaders["test"]))


if __name__ == "__main__":
    main(sys.argv[1])
