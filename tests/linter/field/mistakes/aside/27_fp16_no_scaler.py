# source: https://github.com/engichang1467/Open-Rig3R/issues/35
# mistake: autocast on CUDA defaults to float16 and there is no loss scaling, so small gradients flush to zero and the loss flattens early.
# severity: error
# torch: any
import argparse
import os

import torch
from torch.amp import autocast
from torch.utils.data import DataLoader

from rig.data import RigScenes
from rig.losses import MultiTaskLoss
from rig.models import RigTransformer


def train_epoch(model, loader, criterion, optimizer, device, epoch):
    model.train()
    total = 0.0
    for images, metadata, target in loader:
        images = images.to(device)
        metadata = {k: v.to(device) for k, v in metadata.items()}
        target = {k: v.to(device) for k, v in target.items()}

        optimizer.zero_grad()
        with autocast(device_type="cuda"):  # <- here
            outputs = model(images, metadata)
            loss, parts = criterion(outputs, target)
        loss.backward()  # <- here
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: loss {total / len(loader):.4f}")


@torch.no_grad()
def validate(model, loader, criterion, device):
    model.eval()
    total = 0.0
    for images, metadata, target in loader:
        with autocast(device_type="cuda"):
            loss, _ = criterion(model(images.to(device), metadata), target)
        total += loss.item()
    return total / len(loader)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default=os.environ.get("RIG_DATA", "data"))
    ap.add_argument("--epochs", type=int, default=20)
    args = ap.parse_args()
    device = torch.device("cuda")
    net = RigTransformer().to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.05)
    crit = MultiTaskLoss()
    for ep in range(args.epochs):
        train_epoch(net, DataLoader(RigScenes(args.root, "train"), 4, shuffle=True), crit, opt, device, ep)
        print(validate(net, DataLoader(RigScenes(args.root, "val"), 4), crit, device))
