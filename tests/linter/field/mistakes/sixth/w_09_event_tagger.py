# source: graphnet-team/graphnet issue #846
# mistake: nn.BCELoss on sigmoid outputs inside an autocast region; autocast refuses binary_cross_entropy and raises a RuntimeError
# severity: error
"""Neutrino event tagging with a small DeepSets network."""
import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

CONFIG = {
    "lr": 1e-3,
    "epochs": 40,
    "batch": 512,
    "amp": True,
    "heads": {"track": 1.0, "contained": 0.5, "neutrino": 2.0},
    "losses": {"track": nn.BCELoss, "contained": nn.BCELoss, "neutrino": nn.BCELoss},  # <- here
}


class DeepSet(nn.Module):
    def __init__(self, features, width, heads):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(features, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.rho = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))
        self.heads = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(width, 1), nn.Sigmoid()) for name in heads}  # <- here
        )

    def forward(self, pulses, mask):
        z = self.phi(pulses) * mask.unsqueeze(-1)
        z = z.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        z = self.rho(z)
        return {name: head(z).squeeze(-1) for name, head in self.heads.items()}


def make_objective(cfg):
    fns = {name: cls() for name, cls in cfg["losses"].items()}

    def objective(outputs, truth):
        return sum(cfg["heads"][k] * fns[k](outputs[k], truth[k]) for k in outputs)  # <- here

    return objective


def evaluate(net, loader, device):
    net.eval()
    right = {k: 0 for k in net.heads}
    n = 0
    with torch.no_grad():
        for pulses, mask, truth in loader:
            out = net(pulses.to(device), mask.to(device))
            for k, v in out.items():
                right[k] += ((v > 0.5).cpu() == truth[k].bool()).sum().item()
            n += pulses.size(0)
    return {k: v / n for k, v in right.items()}


def fit(net, train_set, val_set, cfg, device="cuda"):
    train = DataLoader(train_set, cfg["batch"], shuffle=True, num_workers=4)
    val = DataLoader(val_set, cfg["batch"])
    objective = make_objective(cfg)
    optimizer = torch.optim.Adam(net.parameters(), lr=cfg["lr"])
    scaler = torch.cuda.amp.GradScaler(enabled=cfg["amp"])
    for epoch in range(cfg["epochs"]):
        net.train()
        for pulses, mask, truth in train:
            pulses, mask = pulses.to(device), mask.to(device)
            truth = {k: v.to(device).float() for k, v in truth.items()}
            optimizer.zero_grad()
            with torch.cuda.amp.autocast(enabled=cfg["amp"]):
                outputs = net(pulses, mask)
                loss = objective(outputs, truth)  # <- here
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        print(json.dumps({"epoch": epoch, **evaluate(net, val, device)}))


if __name__ == "__main__":
    train_set, val_set = torch.load(sys.argv[1])
    fit(DeepSet(7, 256, CONFIG["heads"]).cuda(), train_set, val_set, CONFIG)
