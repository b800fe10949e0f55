# source: https://github.com/qubvel-org/segmentation_models.pytorch/issues/463
# mistake: the overlap loss is computed outside autocast on float16 probabilities and sums 512x512 of them per image, which exceeds 65504: inf/inf gives NaN.
# severity: error
import argparse
import os

import numpy as np
import segmentation_models_pytorch as smp
import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader

from aerial import TileSet

SIDE = 512


class SoftOverlap(nn.Module):
    def __init__(self, smooth=1.0):
        super().__init__()
        self.smooth = smooth

    def forward(self, prob, mask):
        prob = prob.flatten(1)
        mask = mask.flatten(1).type_as(prob)  # <- here
        inter = (prob * mask).sum(dim=1)  # <- here
        total = prob.sum(dim=1) + mask.sum(dim=1)  # <- here
        return 1 - ((2 * inter + self.smooth) / (total + self.smooth)).mean()


def train_loop(net, loader, overlap, optimizer, scaler, epoch):
    net.train()
    log = []
    for image, mask in loader:
        image = image.cuda(non_blocking=True)
        mask = mask.cuda(non_blocking=True)
        with autocast():
            prob = torch.sigmoid(net(image))  # <- here
        loss = overlap(prob, mask)  # <- here
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        log.append(loss.item())
    print(f"epoch {epoch:02d} train {np.mean(log):.4f}")


def intersection_over_union(net, loader):
    net.eval()
    inter = union = 0
    with torch.no_grad():
        for image, mask in loader:
            with autocast():
                hit = net(image.cuda()) > 0
            ref = mask.cuda() > 0.5
            inter += (hit & ref).sum().item()
            union += (hit | ref).sum().item()
    return inter / max(union, 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--encoder", default="resnet34")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-4)
    opts = parser.parse_args()

    os.makedirs("weights", exist_ok=True)
    net = smp.Unet(opts.encoder, encoder_weights="imagenet", classes=1, activation=None).cuda()
    train_dl = DataLoader(TileSet(opts.root, "train", SIDE), opts.batch, shuffle=True, num_workers=6, drop_last=True)
    valid_dl = DataLoader(TileSet(opts.root, "valid", SIDE), opts.batch, num_workers=6)
    optimizer = torch.optim.Adam(net.parameters(), lr=opts.lr)
    plan = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=3)
    scaler = GradScaler()
    top = 0.0
    for epoch in range(opts.epochs):
        train_loop(net, train_dl, SoftOverlap(), optimizer, scaler, epoch)
        iou = intersection_over_union(net, valid_dl)
        plan.step(iou)
        print(f"epoch {epoch:02d} iou {iou:.4f}")
        if iou > top:
            top = iou
            torch.save(net.state_dict(), f"weights/{opts.encoder}.pth")
