# source: https://github.com/microsoft/Swin-Transformer/issues/311
# mistake: unscale_ is called after every micro-batch although step/update follow only once per accumulation window, so the second call raises
# severity: error
import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class PatchMim(nn.Module):
    def __init__(self, dim=512, depth=8, patch=16, size=224):
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv2d(3, dim, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.zeros(1, (size // patch) ** 2, dim))
        layer = nn.TransformerEncoderLayer(dim, 8, dim * 4, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth)
        self.head = nn.Linear(dim, patch * patch * 3)

    def forward(self, img, mask):
        x = self.proj(img).flatten(2).transpose(1, 2)
        m = mask.unsqueeze(-1).to(x.dtype)
        x = x * (1 - m) + self.token * m + self.pos
        rec = self.head(self.body(x))
        tgt = F.unfold(img, self.patch, stride=self.patch).transpose(1, 2)
        per_patch = (rec.float() - tgt).abs().mean(-1)
        return (per_patch * mask).sum() / mask.sum().clamp(min=1)


def lr_at(step, total, base, warm):
    if step < warm:
        return base * step / warm
    return 0.5 * base * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))


def pretrain_epoch(args, model, loader, optimizer, scaler, start_update):
    model.train()
    update = start_update
    usable = len(loader) - len(loader) % args.accum
    optimizer.zero_grad()
    for it, (img, mask) in enumerate(loader):
        if it >= usable:
            break
        img, mask = img.cuda(non_blocking=True), mask.cuda(non_blocking=True).float()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(img, mask) / args.accum
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # <- here
        if (it + 1) % args.accum == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            for group in optimizer.param_groups:
                group["lr"] = lr_at(update, args.total_updates, args.lr, args.warmup)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            update += 1
    return update


def get_args():
    p = argparse.ArgumentParser("mim")
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--clip", type=float, default=3.0)
    p.add_argument("--lr", type=float, default=4e-4)
    p.add_argument("--warmup", type=int, default=2000)
    p.add_argument("--total-updates", type=int, default=100_000)
    return p.parse_args()


def main(build_loader):
    args = get_args()
    model = PatchMim().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    scaler = torch.amp.GradScaler("cuda")
    done = 0
    while done < args.total_updates:
        done = pretrain_epoch(args, model, build_loader(), optimizer, scaler, done)
