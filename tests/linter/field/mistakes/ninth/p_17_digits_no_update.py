# source: Azure/MS-AMP#45
# mistake: scaler.update() is never called after scaler.step(), so the second step raises "step() has already been called since the last update()"
# severity: error
from __future__ import print_function

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR
from torchvision import datasets, transforms


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 32, 3)
        self.c2 = nn.Conv2d(32, 64, 3)
        self.drop = nn.Dropout(0.4)
        self.f1 = nn.Linear(64 * 12 * 12, 128)
        self.f2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c2(F.relu(self.c1(x)))), 2)
        return self.f2(self.drop(F.relu(self.f1(x.flatten(1)))))


def train(args, model, device, loader, optimizer, epoch, scaler):
    model.train()
    for i, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(data), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # <- here
        if i % args.log_interval == 0:
            print("Train Epoch: {} [{}/{}]\tLoss: {:.6f}".format(epoch, i, len(loader), loss.item()))
            if args.dry_run:
                break


def test(model, device, loader):
    model.eval()
    hits, loss = 0, 0.0
    with torch.inference_mode():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            out = model(data)
            loss += F.cross_entropy(out, target, reduction="sum").item()
            hits += out.argmax(1).eq(target).sum().item()
    n = len(loader.dataset)
    print(f"Test: loss {loss / n:.4f} accuracy {100.0 * hits / n:.2f}%")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--epochs", type=int, default=14)
    p.add_argument("--lr", type=float, default=1.0)
    p.add_argument("--gamma", type=float, default=0.7)
    p.add_argument("--dry-run", action="store_true")
    p.add_argument("--log-interval", type=int, default=10)
    args = p.parse_args()
    device = torch.device("cuda")
    tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.13,), (0.31,))])
    mk = lambda tr: torch.utils.data.DataLoader(
        datasets.MNIST("data", train=tr, download=True, transform=tf), batch_size=args.batch_size, shuffle=tr)
    model = ConvNet().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, 1, gamma=args.gamma)
    scaler = torch.amp.GradScaler("cuda")
    train_loader, test_loader = mk(True), mk(False)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch, scaler)
        test(model, device, test_loader)
        scheduler.step()


if __name__ == "__main__":
    main()
