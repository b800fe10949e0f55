# source: https://github.com/Azure/MS-AMP/pull/45
# mistake: scaler.update() is never called, so the second scaler.step raises "step() has already been called since the last update()"
# severity: error
from __future__ import print_function

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torchvision import datasets, transforms


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.drop = nn.Dropout(0.4)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = self.drop(self.stem(x).flatten(1))
        return self.fc2(F.relu(self.fc1(x)))


def optimize(scaler, optimizer, loss):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # <- here


def train(args, model, device, loader, optimizer, scaler, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        with torch.autocast("cuda", dtype=torch.float16):
            output = model(data)
            loss = F.cross_entropy(output, target)
        optimize(scaler, optimizer, loss)  # <- here
        if batch_idx % args.log_interval == 0:
            print(f"epoch {epoch} [{batch_idx * len(data)}/{len(loader.dataset)}] loss {loss.item():.5f}")


@torch.no_grad()
def test(model, device, loader):
    model.eval()
    loss, hits = 0.0, 0
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        output = model(data)
        loss += F.cross_entropy(output, target, reduction="sum").item()
        hits += output.argmax(1).eq(target).sum().item()
    n = len(loader.dataset)
    print(f"test loss {loss / n:.4f} accuracy {100.0 * hits / n:.2f}%")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--log-interval", type=int, default=10)
    args = parser.parse_args()
    device = torch.device("cuda")
    tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train_loader = torch.utils.data.DataLoader(
        datasets.MNIST("data", train=True, download=True, transform=tf), batch_size=args.batch_size, shuffle=True
    )
    test_loader = torch.utils.data.DataLoader(datasets.MNIST("data", train=False, transform=tf), batch_size=1000)
    model = Net().to(device)
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, scaler, epoch)
        test(model, device, test_loader)
        scheduler.step()


if __name__ == "__main__":
    main()
