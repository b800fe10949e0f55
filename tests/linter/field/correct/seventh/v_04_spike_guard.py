# why correct: when a norm spike makes the loop skip scaler.step, update() is still called after unscale_ and the gradients are cleared, so the scaler's state stays consistent
import argparse
import statistics
from collections import deque

import torch
from torch import nn
from torch.nn import functional as F


class SpikeGuard:
    def __init__(self, window=200, times=4.0):
        self.past = deque(maxlen=window)
        self.times = times

    def ok(self, norm):
        if norm != norm or norm == float("inf"):
            return True
        good = len(self.past) < 50 or norm < self.times * statistics.median(self.past)
        if good:
            self.past.append(norm)
        return good


class Depth(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 48, 5, 2, 2), nn.ELU(), nn.Conv2d(48, 96, 5, 2, 2), nn.ELU())
        self.up = nn.Sequential(nn.ConvTranspose2d(96, 48, 4, 2, 1), nn.ELU(), nn.ConvTranspose2d(48, 1, 4, 2, 1))

    def forward(self, x):
        return self.up(self.down(x))


def silog(pred_log, depth):
    d = (pred_log - depth.clamp(min=1e-3).log())
    return (d.square().mean() - 0.85 * d.mean().square()).clamp(min=1e-6).sqrt()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40_000)
    ap.add_argument("--clip", type=float, default=0.1)
    a = ap.parse_args()
    from kitti import stream

    net = Depth().cuda()
    opt = torch.optim.AdamW(net.parameters(), 1e-4)
    scaler = torch.amp.GradScaler("cuda")
    guard = SpikeGuard()
    dropped = 0
    for step, (img, depth) in zip(range(a.steps), stream()):
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(img.cuda())
        loss = silog(out.float(), depth.cuda())
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norm = nn.utils.clip_grad_norm_(net.parameters(), a.clip).item()
        if guard.ok(norm):
            scaler.step(opt)
        else:
            dropped += 1
        scaler.update()
        opt.zero_grad(set_to_none=True)
        if step % 200 == 0:
            print(step, loss.item(), norm, dropped)


if __name__ == "__main__":
    main()
