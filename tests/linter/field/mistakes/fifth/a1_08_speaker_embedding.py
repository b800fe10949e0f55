# source: engichang1467/Open-Rig3R issue #35
# mistake: autocast runs in float16 (the CUDA default) but no GradScaler exists, so small gradients underflow to zero in the backward pass
# severity: warning
"""Speaker verification with additive-margin softmax."""
import argparse
import pathlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from spk.data import UtteranceCrops
from spk.frontend import LogMel


class StatsPool(nn.Module):
    def forward(self, x):
        x = x.float()
        return torch.cat([x.mean(-1), x.var(-1, unbiased=False).add(1e-5).sqrt()], dim=1)


class XVector(nn.Module):
    def __init__(self, mels=80, width=512, emb=192):
        super().__init__()
        layers, c = [], mels
        for k, d in ((5, 1), (3, 2), (3, 3), (1, 1)):
            layers += [nn.Conv1d(c, width, k, dilation=d), nn.ReLU(), nn.BatchNorm1d(width)]
            c = width
        self.frames = nn.Sequential(*layers)
        self.pool = StatsPool()
        self.proj = nn.Linear(2 * width, emb)

    def forward(self, mel):
        return self.proj(self.pool(self.frames(mel)))


class AmSoftmax(nn.Module):
    def __init__(self, emb, n_speakers, margin=0.2, scale=30.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_speakers, emb) * 0.01)
        self.margin, self.scale = margin, scale

    def forward(self, e, spk):
        cos = F.linear(F.normalize(e.float(), dim=1), F.normalize(self.weight, dim=1)).float()
        cos = cos - self.margin * F.one_hot(spk, cos.size(1))
        return F.cross_entropy(self.scale * cos, spk)


def train_epoch(net, head, frontend, loader, optimizer):
    net.train()
    for wav, spk in loader:
        wav, spk = wav.cuda(non_blocking=True), spk.cuda(non_blocking=True)
        with torch.no_grad():
            mel = frontend(wav)
        with torch.autocast("cuda"):  # <- here
            emb = net(mel)
            loss = head(emb, spk)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # <- here
        nn.utils.clip_grad_norm_([*net.parameters(), *head.parameters()], 3.0)
        optimizer.step()  # <- here
    return loss.item()


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("root", type=pathlib.Path)
    cli.add_argument("--epochs", type=int, default=60)
    cli.add_argument("--out", type=pathlib.Path, default=pathlib.Path("xvector.pt"))
    args = cli.parse_args()

    data = UtteranceCrops(args.root, seconds=3.0)
    loader = DataLoader(data, batch_size=128, shuffle=True, num_workers=8, drop_last=True, pin_memory=True)
    frontend = LogMel().cuda()
    net = XVector().cuda()
    head = AmSoftmax(192, data.n_speakers).cuda()
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1, momentum=0.9, weight_decay=1e-4)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    for epoch in range(args.epochs):
        last = train_epoch(net, head, frontend, loader, optimizer)
        decay.step()
        print(f"[{epoch}] {last:.3f}")
        torch.save({"net": net.state_dict(), "head": head.state_dict(), "epoch": epoch}, args.out)


if __name__ == "__main__":
    main()
