# source: andreped/GradientAccumulator#19
# mistake: adaptive gradient clipping runs on gradients that still carry the loss scale, so almost every unit is clipped to the limit and the loss diverges
# severity: error
import argparse
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def unitwise_norm(x):
    if x.ndim <= 1:
        return x.norm(2)
    return x.norm(2, dim=tuple(range(1, x.ndim)), keepdim=True)


def adaptive_clip_(parameters, clip_factor=0.01, eps=1e-3):
    for p in parameters:
        if p.grad is None:
            continue
        p_norm = unitwise_norm(p.detach()).clamp_(min=eps)
        g_norm = unitwise_norm(p.grad.detach())
        limit = p_norm * clip_factor
        clipped = p.grad.detach() * (limit / g_norm.clamp(min=1e-6))
        p.grad.detach().copy_(torch.where(g_norm < limit, p.grad.detach(), clipped))


class TinyUNet3D(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.down = nn.Sequential(nn.Conv3d(1, width, 3, padding=1), nn.InstanceNorm3d(width), nn.ReLU())
        self.mid = nn.Sequential(nn.Conv3d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.head = nn.Conv3d(2 * width, 1, 1)

    def forward(self, x):
        a = self.down(x)
        b = self.up(self.mid(a))
        return self.head(torch.cat([a, b], 1))


def volumes(n):
    x = torch.randn(n, 1, 32, 32, 32)
    return TensorDataset(x, (x > 1.0).float())


def run_epoch(net, loader, opt, scaler, device, clip):
    net.train()
    seen, total = 0, 0.0
    for vol, seg in loader:
        vol, seg = vol.to(device), seg.to(device)
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            logits = net(vol)
            loss = F.binary_cross_entropy_with_logits(logits, seg)
        scaler.scale(loss).backward()
        adaptive_clip_(net.parameters(), clip)  # <- here
        scaler.step(opt)
        scaler.update()
        total += loss.item() * vol.size(0)
        seen += vol.size(0)
    return total / seen


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--agc", type=float, default=0.01)
    ap.add_argument("--lr", type=float, default=1e-3)
    args = ap.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    device = torch.device("cuda")
    net = TinyUNet3D().to(device)
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cuda")
    loader = DataLoader(volumes(64), batch_size=2, shuffle=True)
    for ep in range(args.epochs):
        print(ep, run_epoch(net, loader, opt, scaler, device, args.agc))


if __name__ == "__main__":
    main()
