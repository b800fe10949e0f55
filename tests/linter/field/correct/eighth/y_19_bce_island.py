# why correct: the probabilities' BCE is computed in a region where autocast is disabled and on float32 values.
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.metrics import average_precision_score
from torch.cuda.amp import GradScaler, autocast

from sed.data import make_loader
from sed.frontend import LogMel


class AttentionPool(nn.Module):
    """Clip probability = attention-weighted mean of frame probabilities."""

    def __init__(self, dim, classes):
        super().__init__()
        self.att = nn.Conv1d(dim, classes, 1)
        self.cla = nn.Conv1d(dim, classes, 1)

    def forward(self, x):
        weight = torch.softmax(torch.tanh(self.att(x)), dim=-1)
        frame = torch.sigmoid(self.cla(x))
        return (weight * frame).sum(-1), frame


class Tagger(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.logmel = LogMel(32000, 1024, 320, 64)
        self.norm = nn.BatchNorm2d(64)
        chans = [1, 64, 128, 256, 512]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
                          nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.AvgPool2d(2))
            for a, b in zip(chans[:-1], chans[1:]))
        self.pool = AttentionPool(512, classes)

    def forward(self, wave):
        with autocast(enabled=False):
            x = self.logmel(wave.float())
        x = self.norm(x.transpose(1, 3)).transpose(1, 3)
        for block in self.blocks:
            x = block(x)
        return self.pool(x.mean(3))


def clip_loss(prob, target):
    with autocast(enabled=False):
        prob = prob.float().clamp(1e-7, 1 - 1e-7)
        return F.binary_cross_entropy(prob, target.float())


def train(cfg):
    net = Tagger(cfg["classes"]).cuda()
    opt = torch.optim.Adam(net.parameters(), lr=cfg["lr"], amsgrad=True)
    scaler = GradScaler()
    loader, valid = make_loader(cfg, "train"), make_loader(cfg, "eval")
    best = 0.0
    for epoch in range(cfg["epochs"]):
        net.train()
        for i, (wave, target) in enumerate(loader):
            wave, target = wave.cuda(), target.cuda()
            opt.zero_grad()
            with autocast():
                prob, _ = net(wave)
                loss = clip_loss(prob, target)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            if i % 200 == 0:
                print(epoch, i, loss.item())
        score = evaluate(net, valid)
        print("epoch", epoch, "mAP", score)
        if score > best:
            best = score
            torch.save(net.state_dict(), cfg["out"])


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    probs, golds = [], []
    for wave, target in loader:
        with autocast():
            prob, _ = net(wave.cuda())
        probs.append(prob.float().cpu().numpy())
        golds.append(target.numpy())
    return float(np.mean(average_precision_score(np.concatenate(golds), np.concatenate(probs), average=None)))


if __name__ == "__main__":
    train(dict(classes=527, lr=1e-3, epochs=30, batch=32, root="/data/audioset", out="tagger.pth"))
