# why correct: unscale, clip, step and update happen only at window ends, and the last short window divides by its own number of micro-batches
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def window_size(index, total, accum):
    start = index - index % accum
    return min(accum, total - start)


class Segmenter(nn.Module):
    def __init__(self, width=32, classes=4):
        super().__init__()
        def cbr(i, o):
            return nn.Sequential(nn.Conv3d(i, o, 3, padding=1), nn.InstanceNorm3d(o), nn.LeakyReLU(0.01, inplace=True))
        self.a, self.b = cbr(1, width), cbr(width, 2 * width)
        self.c = cbr(3 * width, width)
        self.out = nn.Conv3d(width, classes, 1)

    def forward(self, x):
        a = self.a(x)
        b = F.interpolate(self.b(F.max_pool3d(a, 2)), size=a.shape[2:], mode="trilinear", align_corners=False)
        return self.out(self.c(torch.cat([a, b], 1)))


def soft_dice(logits, target, eps=1.0):
    p = logits.float().softmax(1)
    t = F.one_hot(target, p.shape[1]).movedim(-1, 1).float()
    dims = (0, 2, 3, 4)
    inter, size = (p * t).sum(dims), p.sum(dims) + t.sum(dims)
    return 1 - ((2 * inter + eps) / (size + eps)).mean()


def train_epoch(model, loader, optimizer, scaler, accum, clip):
    model.train()
    total = len(loader)
    optimizer.zero_grad(set_to_none=True)
    running = 0.0
    for i, (volume, mask) in enumerate(loader):
        volume, mask = volume.cuda(non_blocking=True), mask.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(volume)
            loss = soft_dice(logits, mask) + F.cross_entropy(logits, mask)
        scaler.scale(loss / window_size(i, total, accum)).backward()
        running += loss.item()
        if (i + 1) % accum and i + 1 != total:
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return running / total


def main(loader):
    parser = argparse.ArgumentParser()
    parser.add_argument("--accum", type=int, default=8)
    parser.add_argument("--clip", type=float, default=12.0)
    parser.add_argument("--epochs", type=int, default=300)
    args = parser.parse_args()
    model = Segmenter().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.99, nesterov=True, weight_decay=3e-5)
    poly = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=args.epochs, power=0.9)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(args.epochs):
        print(epoch, train_epoch(model, loader, optimizer, scaler, args.accum, args.clip))
        poly.step()
    torch.save(model.state_dict(), "segmenter.pt")
