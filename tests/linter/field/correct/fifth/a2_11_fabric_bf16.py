# why correct: bf16-mixed has no loss scaling, Fabric runs forward under its own autocast and does the backward, and its clip_gradients is used
import math

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader


class Upsampler(nn.Module):
    def __init__(self, scale=2, c=64, n=20):
        super().__init__()
        self.first = nn.Conv2d(3, c, 3, padding=1)
        self.rest = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.GELU(), nn.Conv2d(c, c, 3, padding=1)) for _ in range(n))
        self.last = nn.Sequential(nn.Conv2d(c, 3 * scale**2, 3, padding=1), nn.PixelShuffle(scale))
        self.scale = scale

    def forward(self, x):
        h = self.first(x)
        for block in self.rest:
            h = h + 0.1 * block(h)
        return self.last(h) + F.interpolate(x, scale_factor=self.scale, mode="bicubic")


def charbonnier(a, b, eps=1e-3):
    return torch.sqrt((a - b).square() + eps**2).mean()


@torch.no_grad()
def psnr(fabric, net, loader):
    net.eval()
    vals = []
    for low, high in loader:
        err = F.mse_loss(net(low).float().clamp(0, 1), high.float())
        vals.append(-10 * torch.log10(err))
    net.train()
    return fabric.all_reduce(torch.stack(vals).mean(), reduce_op="mean").item()


def main(train_set, val_set, accum=2, total=100_000):
    fabric = Fabric(accelerator="cuda", devices=2, strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(3)
    net = Upsampler()
    opt = torch.optim.AdamW(net.parameters(), lr=3e-4)
    net, opt = fabric.setup(net, opt)
    train = fabric.setup_dataloaders(DataLoader(train_set, 16, shuffle=True, num_workers=8, drop_last=True))
    val = fabric.setup_dataloaders(DataLoader(val_set, 1))

    state = {"net": net, "opt": opt, "it": 0}
    micro = 0
    while state["it"] < total:
        for low, high in train:
            micro += 1
            stepping = micro % accum == 0
            with fabric.no_backward_sync(net, enabled=not stepping):
                loss = charbonnier(net(low).float(), high.float())
                fabric.backward(loss / accum)
            if not stepping:
                continue
            fabric.clip_gradients(net, opt, max_norm=0.5)
            opt.step()
            opt.zero_grad()
            state["it"] += 1
            it = state["it"]
            for g in opt.param_groups:
                g["lr"] = 1.5e-4 * (1 + math.cos(math.pi * it / total))
            if it % 5000 == 0:
                fabric.print(it, loss.item(), psnr(fabric, net, val))
                fabric.save(f"sr_{it}.ckpt", state)
            if it >= total:
                break
