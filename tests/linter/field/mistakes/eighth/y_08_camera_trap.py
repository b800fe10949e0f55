# source: https://github.com/conservationtechlab/animl-py/issues/298
# mistake: a new GradScaler is made in the per-epoch function, so the learned loss scale is dropped at every epoch.
# severity: warning
import argparse
import json
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder
from torchvision.models import convnext_tiny


def loaders(root, batch):
    aug = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(),
                     T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
    plain = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor(),
                       T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
    train = ImageFolder(Path(root) / "train", aug)
    valid = ImageFolder(Path(root) / "valid", plain)
    return (DataLoader(train, batch, shuffle=True, num_workers=8, pin_memory=True),
            DataLoader(valid, batch, num_workers=8, pin_memory=True), train.classes)


def run_epoch(net, loader, criterion, device, optimizer=None, mixed=False):
    learning = optimizer is not None
    net.train(learning)
    scaler = torch.amp.GradScaler("cuda", enabled=mixed)  # <- here
    total, right, seen = 0.0, 0, 0
    for images, species in loader:
        images, species = images.to(device), species.to(device)
        with torch.set_grad_enabled(learning), torch.amp.autocast("cuda", enabled=mixed):
            logits = net(images)
            loss = criterion(logits, species)
        if learning:
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        total += loss.item() * len(species)
        right += (logits.argmax(1) == species).sum().item()
        seen += len(species)
    return total / seen, right / seen


def main():
    p = argparse.ArgumentParser()
    p.add_argument("root")
    p.add_argument("--epochs", type=int, default=60)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--mixed", action="store_true")
    p.add_argument("--out", default="species.pt")
    a = p.parse_args()

    device = torch.device("cuda")
    train_dl, valid_dl, classes = loaders(a.root, a.batch)
    net = convnext_tiny(weights="DEFAULT")
    net.classifier[2] = nn.Linear(net.classifier[2].in_features, len(classes))
    net.to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    optimizer = torch.optim.AdamW(net.parameters(), lr=a.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, a.epochs)
    history, best = [], 0.0
    for epoch in range(a.epochs):
        tl, ta = run_epoch(net, train_dl, criterion, device, optimizer, a.mixed)  # <- here
        with torch.no_grad():
            vl, va = run_epoch(net, valid_dl, criterion, device, mixed=a.mixed)
        schedule.step()
        history.append(dict(epoch=epoch, train=tl, train_acc=ta, valid=vl, valid_acc=va))
        if va > best:
            best = va
            torch.save({"weights": net.state_dict(), "classes": classes}, a.out)
    Path(a.out).with_suffix(".json").write_text(json.dumps(history, indent=1))


if __name__ == "__main__":
    main()
