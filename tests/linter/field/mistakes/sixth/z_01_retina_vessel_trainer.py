# source: milesial/Pytorch-UNet issue #468 (fixed in PR #470)
# mistake: the norm is limited while the gradients still carry the loss scale, so nearly every step is clipped to a vanishing update
# severity: error
"""Retinal vessel segmentation, single GPU."""
import argparse
import logging
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

log = logging.getLogger("vessels")


def double_conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True),
                         nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True))


class SmallUNet(nn.Module):
    def __init__(self, base=32, classes=2):
        super().__init__()
        self.enc1, self.enc2 = double_conv(3, base), double_conv(base, 2 * base)
        self.up = nn.ConvTranspose2d(2 * base, base, 2, stride=2)
        self.dec, self.head = double_conv(2 * base, base), nn.Conv2d(base, classes, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(F.max_pool2d(a, 2))
        return self.head(self.dec(torch.cat([a, self.up(b)], 1)))


class VesselTrainer:
    def __init__(self, net, loader, opts):
        self.net = net.to(opts.device, memory_format=torch.channels_last)
        self.loader = loader
        self.opts = opts
        self.optim = torch.optim.RMSprop(self.net.parameters(), lr=opts.lr, momentum=0.99, foreach=True)
        self.amp = torch.amp.GradScaler("cuda", enabled=opts.half_compute)
        self.criterion = nn.CrossEntropyLoss()
        self.steps = 0

    def _objective(self, images, masks):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.opts.half_compute):
            return self.criterion(self.net(images), masks)

    def _limit(self):
        return nn.utils.clip_grad_norm_(self.net.parameters(), self.opts.max_norm)  # <- here

    def _backward(self, loss):
        self.optim.zero_grad(set_to_none=True)
        self.amp.scale(loss).backward()  # <- here

    def _commit(self):
        norm = self._limit()  # <- here
        self.amp.step(self.optim)
        self.amp.update()
        self.steps += 1
        return norm

    def run_epoch(self, epoch):
        self.net.train()
        total = 0.0
        for images, masks in self.loader:
            images = images.to(self.opts.device, memory_format=torch.channels_last)
            masks = masks.to(self.opts.device)
            loss = self._objective(images, masks)
            self._backward(loss)
            self._commit()
            total += loss.item()
        log.info("epoch %d loss %.4f after %d steps", epoch, total / len(self.loader), self.steps)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--lr", type=float, default=1e-5)
    p.add_argument("--max-norm", type=float, default=1.0)
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--device", default="cuda")
    p.add_argument("--half-compute", action="store_true")
    opts = p.parse_args()
    logging.basicConfig(level=logging.INFO)
    blob = torch.load(opts.data)
    loader = DataLoader(TensorDataset(blob["x"], blob["y"]), batch_size=8, shuffle=True, drop_last=True)
    trainer = VesselTrainer(SmallUNet(), loader, opts)
    for e in range(opts.epochs):
        trainer.run_epoch(e)
    torch.save(trainer.net.state_dict(), "vessels_final.pt")


if __name__ == "__main__":
    main()
