# why correct: activation checkpointing (non-reentrant) under fp16 autocast restores the autocast state in recomputation; backward is outside autocast and clipping follows unscale_
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Hyper:
    width: int = 64
    levels: int = 4
    lr: float = 3e-4
    epochs: int = 500
    patch: int = 128
    clip: float = 12.0
    amp: torch.dtype | None = torch.float16
    deep_weights: list = field(default_factory=lambda: [0.57, 0.29, 0.14])


class Pair(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.seq = nn.Sequential(nn.Conv3d(i, o, 3, padding=1), nn.InstanceNorm3d(o, affine=True), nn.LeakyReLU(0.01),
                                 nn.Conv3d(o, o, 3, padding=1), nn.InstanceNorm3d(o, affine=True), nn.LeakyReLU(0.01))

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            return checkpoint(self.seq, x, use_reentrant=False)
        return self.seq(x)


class DeepUNet(nn.Module):
    def __init__(self, h: Hyper, chans=4, classes=4):
        super().__init__()
        w = [h.width * 2**i for i in range(h.levels)]
        self.down = nn.ModuleList(Pair(a, b) for a, b in zip([chans] + w[:-1], w))
        self.up = nn.ModuleList(Pair(a + b, b) for a, b in zip(w[:0:-1], w[-2::-1]))
        self.heads = nn.ModuleList(nn.Conv3d(b, classes, 1) for b in w[-2::-1])

    def forward(self, x):
        skips = []
        for i, d in enumerate(self.down):
            x = d(x if i == 0 else nn.functional.max_pool3d(x, 2))
            skips.append(x)
        out = []
        for u, head, s in zip(self.up, self.heads, skips[-2::-1]):
            x = nn.functional.interpolate(x, scale_factor=2, mode="nearest")
            x = u(torch.cat([x, s], 1))
            out.append(head(x))
        return out[::-1]


def dice_ce(logits, label):
    logits = logits.float()
    p = logits.softmax(1)
    hot = nn.functional.one_hot(label, p.size(1)).movedim(-1, 1).float()
    dims = (0, 2, 3, 4)
    inter, size = (p * hot).sum(dims), p.sum(dims) + hot.sum(dims)
    dice = ((2 * inter + 1e-5) / (size + 1e-5)).mean()
    return nn.functional.cross_entropy(logits, label) + 1 - dice


def loss_of(outputs, label, weights):
    total = 0.0
    for out, w in zip(outputs, weights):
        small = nn.functional.interpolate(label[:, None].float(), size=out.shape[2:], mode="nearest")[:, 0].long()
        total = total + w * dice_ce(out, small)
    return total


def fit(loader, h=Hyper()):
    net = DeepUNet(h).cuda()
    opt = torch.optim.SGD(net.parameters(), h.lr, momentum=0.99, nesterov=True, weight_decay=3e-5)
    poly = torch.optim.lr_scheduler.PolynomialLR(opt, h.epochs, 0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=h.amp == torch.float16)
    for epoch in range(h.epochs):
        net.train()
        for scan, label in loader:
            with torch.autocast("cuda", dtype=h.amp, enabled=h.amp is not None):
                outputs = net(scan.cuda(non_blocking=True))
            loss = loss_of(outputs, label.cuda(non_blocking=True).long(), h.deep_weights)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), h.clip)
            scaler.step(opt)
            scaler.update()
        poly.step()
        print(epoch, loss.item())
    return net
