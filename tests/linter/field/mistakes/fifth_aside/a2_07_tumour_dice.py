# source: https://github.com/qubvel-org/segmentation_models.pytorch/issues/463
# mistake: the Dice loss is computed outside autocast on float16 probabilities, so the voxel sums over a 128^3 patch exceed 65504 and become inf, the loss NaN
# severity: error
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Options:
    patch: tuple = (128, 128, 128)
    classes: int = 4
    batch: int = 2
    lr: float = 1e-3
    epochs: int = 300


class TinyVNet(nn.Module):
    def __init__(self, cin=4, classes=4, f=24):
        super().__init__()
        self.down = nn.Sequential(nn.Conv3d(cin, f, 3, padding=1), nn.InstanceNorm3d(f), nn.LeakyReLU())
        self.deep = nn.Sequential(nn.Conv3d(f, 2 * f, 3, stride=2, padding=1), nn.InstanceNorm3d(2 * f),
                                  nn.LeakyReLU(), nn.Conv3d(2 * f, 2 * f, 3, padding=1), nn.LeakyReLU())
        self.up = nn.ConvTranspose3d(2 * f, f, 2, stride=2)
        self.head = nn.Conv3d(2 * f, classes, 1)

    def forward(self, x):
        a = self.down(x)
        b = self.up(self.deep(a))
        return self.head(torch.cat([a, b], 1))


def region_overlap(logits, labels, n_cls, smooth=1.0):
    p = torch.sigmoid(logits)  # <- here
    t = F.one_hot(labels, n_cls).permute(0, 4, 1, 2, 3).to(p.dtype)
    axes = (2, 3, 4)
    inter = (p * t).sum(axes)  # <- here
    size = p.sum(axes) + t.sum(axes)  # <- here
    return 1.0 - ((2.0 * inter + smooth) / (size + smooth)).mean()


def main(loader):
    opt = Options()
    net = TinyVNet(classes=opt.classes).cuda()
    adam = torch.optim.Adam(net.parameters(), lr=opt.lr)
    scaler = torch.cuda.amp.GradScaler()
    for epoch in range(opt.epochs):
        net.train()
        seen, run = 0, 0.0
        for batch in loader:
            vol = batch["image"].cuda(non_blocking=True)
            lab = batch["label"].cuda(non_blocking=True).long()
            adam.zero_grad(set_to_none=True)
            with torch.cuda.amp.autocast():
                logits = net(vol)
            loss = region_overlap(logits, lab, opt.classes)  # <- here
            scaler.scale(loss).backward()
            scaler.step(adam)
            scaler.update()
            run += loss.item()
            seen += 1
        print(f"epoch {epoch}: dice loss {run / max(seen, 1):.4f}")
    torch.save(net.state_dict(), "vnet.pt")
