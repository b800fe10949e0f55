# re-expressed from github.com/qubvel-org/segmentation_models.pytorch issue 463: soft dice summed half-precision probabilities over a whole 512x512 image and reached inf
import logging
import time

import segmentation_models_pytorch as smp
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from datasets.aerial import AerialTiles

log = logging.getLogger("seg")


class SoftDice(nn.Module):
    """Multi-class soft dice on logits; pixels equal to ``ignore_index`` are left out."""

    def __init__(self, num_classes, smooth=1.0, ignore_index=255):
        super().__init__()
        self.num_classes = num_classes
        self.smooth = smooth
        self.ignore_index = ignore_index

    def forward(self, logits, target):
        valid = target != self.ignore_index
        onehot = F.one_hot(target.masked_fill(~valid, 0), self.num_classes).permute(0, 3, 1, 2)
        probs = logits.softmax(dim=1) * valid.unsqueeze(1)
        onehot = (onehot * valid.unsqueeze(1)).to(probs.dtype)
        inter = (probs * onehot).sum(dim=(0, 2, 3))  # <- here
        total = probs.sum(dim=(0, 2, 3)) + onehot.sum(dim=(0, 2, 3))  # <- here
        score = (2 * inter + self.smooth) / (total + self.smooth)
        return 1 - score.mean()


class Meter:
    def __init__(self):
        self.total, self.n = 0.0, 0

    def add(self, v, k=1):
        self.total += v * k
        self.n += k

    @property
    def mean(self):
        return self.total / max(self.n, 1)


class Trainer:
    def __init__(self, model, loaders, num_classes, epochs, device="cuda", lr=3e-4):
        self.model = model.to(device)
        self.train_loader, self.val_loader = loaders
        self.device, self.epochs = device, epochs
        self.num_classes = num_classes
        self.ce = nn.CrossEntropyLoss(ignore_index=255)
        self.dice = SoftDice(num_classes)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.01)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, epochs)
        self.scaler = torch.amp.GradScaler("cuda")

    def train_epoch(self):
        self.model.train()
        meter = Meter()
        for images, masks in self.train_loader:
            images, masks = images.to(self.device, non_blocking=True), masks.to(self.device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.float16):
                logits = self.model(images)
            loss = self.ce(logits.float(), masks) + 0.5 * self.dice(logits, masks)
            self.opt.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
            meter.add(loss.item(), images.size(0))
        self.sched.step()
        return meter.mean

    @torch.inference_mode()
    def evaluate(self):
        self.model.eval()
        inter = torch.zeros(self.num_classes, device=self.device)
        union = torch.zeros(self.num_classes, device=self.device)
        for images, masks in self.val_loader:
            images, masks = images.to(self.device), masks.to(self.device)
            with torch.autocast("cuda", dtype=torch.float16):
                pred = self.model(images).argmax(1)
            for c in range(self.num_classes):
                p, t = pred == c, masks == c
                inter[c] += (p & t).sum()
                union[c] += (p | t).sum()
        return (inter / union.clamp(min=1)).mean().item()

    def fit(self):
        for epoch in range(self.epochs):
            start = time.time()
            loss = self.train_epoch()
            log.info("epoch %d loss %.4f miou %.4f (%.0fs)", epoch, loss, self.evaluate(), time.time() - start)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    net = smp.Unet("resnet50", encoder_weights="imagenet", classes=7)
    mk = lambda split, sh: DataLoader(AerialTiles("data/aerial", split, size=512), 8, shuffle=sh, num_workers=8)
    Trainer(net, (mk("train", True), mk("val", False)), num_classes=7, epochs=80).fit()
