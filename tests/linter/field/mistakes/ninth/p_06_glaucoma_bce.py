# source: microsoft/InnerEye-DeepLearning#401
# mistake: BCELoss on sigmoid outputs is called inside a float16 autocast region, which raises "unsafe to autocast"
# severity: error
import argparse

import torch
import torch.nn as nn


class FundusClassifier(nn.Module):
    def __init__(self, channels=(16, 32, 64)):
        super().__init__()
        blocks, prev = [], 3
        for c in channels:
            blocks += [nn.Conv2d(prev, c, 3, stride=2, padding=1), nn.BatchNorm2d(c), nn.ReLU(inplace=True)]
            prev = c
        self.features = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.score = nn.Sequential(nn.Linear(prev, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())

    def forward(self, x):
        return self.score(self.pool(self.features(x)).flatten(1)).squeeze(1)


def loop(model, data, criterion, device, optimizer=None, scaler=None):
    training = optimizer is not None
    model.train(training)
    running = 0.0
    with torch.set_grad_enabled(training):
        for scan, label in data:
            scan, label = scan.to(device), label.float().to(device)
            with torch.autocast(device.type, dtype=torch.float16):
                prob = model(scan)
                loss = criterion(prob, label)  # <- here
            if training:
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            running += loss.item()
    return running / len(data)


def get_args():
    p = argparse.ArgumentParser(description="glaucoma screening")
    p.add_argument("--data", required=True)
    p.add_argument("--epochs", default=25, type=int)
    p.add_argument("--lr", default=1e-4, type=float)
    return p.parse_args()


def main():
    args = get_args()
    device = torch.device("cuda")
    blob = torch.load(args.data)
    make = lambda part: torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(blob[part]["x"], blob[part]["y"]), batch_size=16, shuffle=part == "train")
    train, val = make("train"), make("val")
    model = FundusClassifier().to(device)
    criterion = nn.BCELoss()  # <- here
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler(device.type)
    for e in range(args.epochs):
        tr = loop(model, train, criterion, device, optimizer, scaler)
        va = loop(model, val, criterion, device)
        print(f"{e:03d} train {tr:.4f} val {va:.4f}")


if __name__ == "__main__":
    main()
