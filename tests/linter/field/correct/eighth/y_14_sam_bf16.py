# why correct: sharpness-aware minimization steps twice per batch, but with bfloat16 autocast, so there is no scale in the gradients; the perturbation is undone before the real step.
import argparse
from collections import defaultdict

import torch
import torch.nn as nn
import torchvision
from torch.utils.data import DataLoader
from torchvision import transforms as T


class SharpnessAware:
    def __init__(self, inner, rho=0.05):
        self.inner = inner
        self.rho = rho
        self.shift = defaultdict(lambda: None)

    @property
    def params(self):
        return [p for g in self.inner.param_groups for p in g["params"] if p.grad is not None]

    @torch.no_grad()
    def climb(self):
        norm = torch.stack([p.grad.norm() for p in self.params]).norm()
        for p in self.params:
            e = p.grad * (self.rho / (norm + 1e-12))
            p.add_(e)
            self.shift[p] = e
        self.inner.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p, e in self.shift.items():
            p.sub_(e)
        self.shift.clear()
        self.inner.step()
        self.inner.zero_grad()


class FreezeStats:
    """Keeps BatchNorm's running statistics as they are during the second pass."""

    def __init__(self, net):
        self.norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def __enter__(self):
        self.kept = [m.momentum for m in self.norms]
        for m in self.norms:
            m.momentum = 0.0

    def __exit__(self, *_):
        for m, k in zip(self.norms, self.kept):
            m.momentum = k


def forward_loss(net, x, y):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return nn.functional.cross_entropy(net(x), y, label_smoothing=0.1)


def epoch(net, loader, sam):
    net.train()
    total = 0.0
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        loss = forward_loss(net, x, y)
        loss.backward()
        sam.climb()
        with FreezeStats(net):
            forward_loss(net, x, y).backward()
        sam.descend()
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def accuracy(net, loader):
    net.eval()
    right = 0
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            right += (net(x.cuda()).argmax(1).cpu() == y).sum().item()
    return right / len(loader.dataset)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="./data")
    ap.add_argument("--epochs", type=int, default=200)
    ap.add_argument("--rho", type=float, default=0.1)
    a = ap.parse_args()
    norm = T.Normalize((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))
    aug = T.Compose([T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.ToTensor(), norm])
    plain = T.Compose([T.ToTensor(), norm])
    train = DataLoader(torchvision.datasets.CIFAR100(a.root, True, aug), 128, shuffle=True, num_workers=4)
    test = DataLoader(torchvision.datasets.CIFAR100(a.root, False, plain), 512, num_workers=4)
    net = torchvision.models.resnet18(num_classes=100)
    net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    net.cuda()
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    sam = SharpnessAware(inner, a.rho)
    plan = torch.optim.lr_scheduler.CosineAnnealingLR(inner, a.epochs)
    for e in range(a.epochs):
        print(e, f"{epoch(net, train, sam):.4f}", f"{accuracy(net, test):.4f}")
        plan.step()


if __name__ == "__main__":
    main()
