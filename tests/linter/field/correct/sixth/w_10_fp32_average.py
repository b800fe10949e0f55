# why correct: the network's weights and their average are float32 (bfloat16 only by autocast); the average is rounded to bfloat16 only in a copy written for inference
import copy
import math
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def export_bf16(averaged: AveragedModel, path: Path):
    twin = copy.deepcopy(averaged.module).to(torch.bfloat16)
    torch.save(twin.state_dict(), path)


class Upscaler(nn.Module):
    def __init__(self, c=96, depth=16, factor=4):
        super().__init__()
        self.head = nn.Conv2d(3, c, 3, padding=1)
        self.body = nn.Sequential(*[
            nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.PReLU(c), nn.Conv2d(c, c, 3, padding=1))
            for _ in range(depth)])
        self.tail = nn.Sequential(nn.Conv2d(c, 3 * factor**2, 3, padding=1), nn.PixelShuffle(factor))

    def forward(self, x):
        h = self.head(x)
        for blk in self.body:
            h = h + 0.2 * blk(h)
        return self.tail(h)


def charbonnier(a, b, eps=1e-6):
    return torch.sqrt((a.float() - b.float()).square() + eps**2).mean()


@torch.no_grad()
def psnr(model, loader):
    model.eval()
    out = []
    for low, high in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            rec = model(low.cuda())
        mse = (rec.float().clamp(0, 1) - high.cuda()).square().mean((1, 2, 3)).clamp_min(1e-10)
        out += (-10 * mse.log10()).tolist()
    return sum(out) / len(out)


def learn(train_dl, val_dl, iters=300_000, lr=2e-4, decay=0.9995, folder="runs/up"):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    net = Upscaler().cuda()
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(decay))
    opt = torch.optim.Adam(net.parameters(), lr=lr, betas=(0.9, 0.99), fused=True)

    def factor(i):
        return min(1.0, i / 2000) * 0.5 * (1 + math.cos(math.pi * min(1.0, i / iters)))

    sched = torch.optim.lr_scheduler.LambdaLR(opt, factor)
    it = 0
    while it < iters:
        for low, high in train_dl:
            net.train()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                rec = net(low.cuda(non_blocking=True))
            loss = charbonnier(rec, high.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            averaged.update_parameters(net)
            it += 1
            if it % 5000 == 0:
                print(f"{it}: loss {loss.item():.4f} psnr {psnr(averaged, val_dl):.2f}")
                export_bf16(averaged, folder / "average_bf16.pt")
                torch.save({"net": net.state_dict(), "averaged": averaged.state_dict(),
                            "opt": opt.state_dict(), "sched": sched.state_dict(), "it": it},
                           folder / "last.pt")
            if it >= iters:
                break
