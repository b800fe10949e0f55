# why correct: features come from a frozen backbone under float16 autocast and no_grad and are stored as float32; the LBFGS closure runs wholly in float32, so no scaler is needed.
import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets

import timm
from timm.data import create_transform, resolve_data_config


@torch.no_grad()
def features(backbone, loader, device):
    backbone.eval()
    xs, ys = [], []
    for x, y in loader:
        with torch.autocast(device.type, dtype=torch.float16):
            f = backbone(x.to(device))
        xs.append(F.normalize(f.float(), dim=-1).cpu())
        ys.append(y)
    return torch.cat(xs), torch.cat(ys)


class Probe(nn.Module):
    def __init__(self, dim, classes):
        super().__init__()
        self.linear = nn.Linear(dim, classes)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return self.linear(x)


def fit(x, y, classes, strength, device, iterations=200):
    probe = Probe(x.shape[1], classes).to(device)
    x, y = x.to(device), y.to(device)
    optimizer = torch.optim.LBFGS(probe.parameters(), lr=1.0, max_iter=iterations, history_size=20,
                                  tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(probe(x), y) + 0.5 / (strength * len(x)) * probe.linear.weight.pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return probe


@torch.no_grad()
def accuracy(probe, x, y, device):
    probe.eval()
    hits = [(probe(a.to(device)).argmax(1).cpu() == b).float().mean().item() * len(a)
            for a, b in zip(x.split(8192), y.split(8192))]
    return sum(hits) / len(x)


def sweep(train, valid, classes, device):
    results = {}
    for strength in np.logspace(-4, 4, 17):
        probe = fit(*train, classes, strength, device)
        results[strength] = accuracy(probe, *valid, device)
        print(f"C={strength:.4g} accuracy {results[strength]:.4f}")
    return max(results, key=results.get)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("root")
    ap.add_argument("--model", default="vit_base_patch16_clip_224.openai")
    ap.add_argument("--batch", type=int, default=256)
    a = ap.parse_args()
    device = torch.device("cuda")
    backbone = timm.create_model(a.model, pretrained=True, num_classes=0).to(device)
    tf = create_transform(**resolve_data_config({}, model=backbone))
    parts = {}
    for split in ("train", "val", "test"):
        data = datasets.ImageFolder(f"{a.root}/{split}", tf)
        parts[split] = features(backbone, DataLoader(data, a.batch, num_workers=8), device)
        classes = len(data.classes)
    best = sweep(parts["train"], parts["val"], classes, device)
    both = tuple(torch.cat(pair) for pair in zip(parts["train"], parts["val"]))
    probe = fit(*both, classes, best, device, iterations=1000)
    print(f"test accuracy {accuracy(probe, *parts['test'], device):.4f} with C={best:.4g}")
    torch.save(probe.state_dict(), "probe.pt")


if __name__ == "__main__":
    main()
