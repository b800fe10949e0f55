# why correct: the model ends in a sigmoid and the loss is plain binary_cross_entropy, but it is computed with autocast disabled on float32 tensors
import argparse
from contextlib import nullcontext

import torch
import torch.nn as nn
import torch.nn.functional as F


class SideOutput(nn.Module):
    def __init__(self, c, scale):
        super().__init__()
        self.conv, self.scale = nn.Conv2d(c, 1, 1), scale

    def forward(self, x):
        return F.interpolate(self.conv(x), scale_factor=self.scale, mode="bilinear", align_corners=False)


class EdgeNet(nn.Module):
    """Side outputs are fused in logit space; the result is a probability in float32."""

    def __init__(self, width=(32, 64, 128)):
        super().__init__()
        self.stages = nn.ModuleList()
        c = 3
        for i, w in enumerate(width):
            self.stages.append(nn.Sequential(nn.Conv2d(c, w, 3, 1 if i == 0 else 2, 1), nn.BatchNorm2d(w), nn.ReLU(),
                                             nn.Conv2d(w, w, 3, 1, 1), nn.BatchNorm2d(w), nn.ReLU()))
            c = w
        self.sides = nn.ModuleList(SideOutput(w, 2**i) for i, w in enumerate(width))
        self.fuse = nn.Conv2d(len(width), 1, 1)

    def forward(self, x):
        outs = []
        for stage, side in zip(self.stages, self.sides):
            x = stage(x)
            outs.append(side(x))
        outs.append(self.fuse(torch.cat(outs, 1)))
        return [torch.sigmoid(o.float()) for o in outs]


def balanced_bce(prob, edge):
    with torch.autocast(device_type=prob.device.type, enabled=False):
        prob, edge = prob.float(), edge.float()
        pos = edge.mean()
        weight = torch.where(edge > 0.5, 1 - pos, 1.1 * pos)
        return F.binary_cross_entropy(prob, edge, weight=weight)


def train(args, loader):
    device = torch.device(args.device)
    net = EdgeNet().to(device)
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)
    use_amp = args.amp and device.type == "cuda"
    scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
    for epoch in range(args.epochs):
        for img, edge in loader:
            img, edge = img.to(device), edge.to(device)
            with torch.autocast("cuda", dtype=torch.float16) if use_amp else nullcontext():
                loss = sum(balanced_bce(p, edge) for p in net(img))
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            if args.clip:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(net.parameters(), args.clip)
            scaler.step(opt)
            scaler.update()
        print(epoch, loss.item())


def cli():
    p = argparse.ArgumentParser()
    p.add_argument("--device", default="cuda")
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--epochs", type=int, default=30)
    p.add_argument("--clip", type=float, default=0.0)
    p.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
    return p.parse_args()
