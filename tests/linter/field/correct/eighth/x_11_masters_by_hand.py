# why correct: the float16 network has a float32 copy of its weights; the loss scale is divided out in float32 and a step with infinite gradients is left out
import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from barcodes.reads import read_batches


class BarcodeNet(nn.Module):
    def __init__(self, channels=192, symbols=4, tags=96):
        super().__init__()
        layers, c = [], symbols
        for i in range(6):
            layers += [nn.Conv1d(c, channels, 7, 2 if i % 2 else 1, 3), nn.GroupNorm(8, channels), nn.ReLU()]
            c = channels
        self.net = nn.Sequential(*layers)
        self.out = nn.Linear(channels, tags)

    def forward(self, x):
        return self.out(self.net(x).mean(-1))


class MasterWeights:
    def __init__(self, model, scale):
        self.low = [p for p in model.parameters() if p.requires_grad]
        self.high = [p.detach().clone().float().requires_grad_(True) for p in self.low]
        self.scale = float(scale)
        self.skipped = 0

    def collect(self):
        """Scaled float16 gradients -> true float32 gradients; False if there is an overflow."""
        fine = True
        for lo, hi in zip(self.low, self.high):
            hi.grad = None if lo.grad is None else lo.grad.float().div_(self.scale)
            if hi.grad is not None and not torch.isfinite(hi.grad).all():
                fine = False
        return fine

    @torch.no_grad()
    def spread(self):
        for lo, hi in zip(self.low, self.high):
            lo.copy_(hi)

    def clear(self):
        for p in self.low:
            p.grad = None


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--reads", default="run42.pod")
    ap.add_argument("--static-scale", type=float, default=512.0)
    ap.add_argument("--steps", type=int, default=40_000)
    ap.add_argument("--lr", type=float, default=1e-3)
    args = ap.parse_args()

    reference = BarcodeNet().cuda()
    model = BarcodeNet().cuda().half()
    masters = MasterWeights(reference, args.static_scale)
    masters.low = list(model.parameters())
    masters.spread()
    optimizer = torch.optim.AdamW(masters.high, lr=args.lr, weight_decay=0.01)

    for step, (signal, tag) in enumerate(read_batches(args.reads, 512, args.steps)):
        for g in optimizer.param_groups:
            g["lr"] = args.lr * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        logits = model(signal.cuda().half())
        loss = F.cross_entropy(logits.float(), tag.cuda())
        masters.clear()
        (loss * masters.scale).backward()
        if masters.collect():
            nn.utils.clip_grad_norm_(masters.high, 1.0)
            optimizer.step()
            masters.spread()
        else:
            masters.skipped += 1
        if step % 500 == 0:
            print(step, loss.item(), "skipped", masters.skipped)

    torch.save([p.detach().cpu() for p in masters.high], "barcode_masters.pt")


if __name__ == "__main__":
    main()
