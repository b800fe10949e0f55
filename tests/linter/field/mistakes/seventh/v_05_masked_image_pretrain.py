# source: microsoft/Swin-Transformer issue #311 https://github.com/microsoft/Swin-Transformer/issues/311
# mistake: with accumulation, gradients are unscaled after every micro-batch instead of once per optimizer step: the second unscale_ raises
# severity: error
import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class PatchFiller(nn.Module):
    def __init__(self, patch=16, dim=384, depth=8):
        super().__init__()
        self.patch = patch
        self.embed = nn.Conv2d(3, dim, patch, patch)
        self.hole = nn.Parameter(torch.zeros(1, 1, dim))
        layer = nn.TransformerEncoderLayer(dim, 6, dim * 4, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, depth)
        self.out = nn.Linear(dim, 3 * patch * patch)

    def forward(self, img, mask):
        tok = self.embed(img).flatten(2).transpose(1, 2)
        m = mask.unsqueeze(-1)
        tok = torch.where(m, self.hole.to(tok.dtype), tok)
        return self.out(self.enc(tok))


def patches(img, p):
    return F.unfold(img, p, stride=p).transpose(1, 2)


def grad_norm(params):
    return math.sqrt(sum(p.grad.float().pow(2).sum().item() for p in params if p.grad is not None))


def epoch(args, net, loader, opt, scaler, sched):
    net.train()
    opt.zero_grad()
    for idx, img in enumerate(loader):
        img = img.cuda(non_blocking=True)
        mask = torch.rand(img.size(0), (img.size(-1) // net.patch) ** 2, device=img.device) < 0.6
        with torch.cuda.amp.autocast():
            rec = net(img, mask)
        target = patches(img, net.patch)
        loss = (F.l1_loss(rec.float(), target, reduction="none").mean(-1) * mask).sum() / mask.sum()

        if args.accum > 1:
            scaler.scale(loss / args.accum).backward()
            scaler.unscale_(opt)  # <- here
            norm = grad_norm(net.parameters())
            if (idx + 1) % args.accum == 0:  # <- here
                nn.utils.clip_grad_norm_(net.parameters(), args.clip)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
                sched.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            norm = nn.utils.clip_grad_norm_(net.parameters(), args.clip).item()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            sched.step()
        if idx % 100 == 0:
            print(idx, f"loss {loss.item():.4f} norm {norm:.3f} scale {scaler.get_scale():.0f}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--clip", type=float, default=5.0)
    ap.add_argument("--epochs", type=int, default=100)
    args = ap.parse_args()
    from imgs import build_loader

    loader = build_loader()
    net = PatchFiller().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs * len(loader) // args.accum)
    scaler = torch.cuda.amp.GradScaler()
    for _ in range(args.epochs):
        epoch(args, net, loader, opt, scaler, sched)


if __name__ == "__main__":
    main()
