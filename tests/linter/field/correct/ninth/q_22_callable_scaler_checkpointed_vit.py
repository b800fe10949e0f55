# why correct: a callable wrapper scales, and unscales/clips/steps only when asked to; activation checkpointing re-enters the same autocast state by itself
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class LossScaler:
    state_dict_key = "loss_scaler"

    def __init__(self, enabled=True):
        self._inner = torch.cuda.amp.GradScaler(enabled=enabled)

    def __call__(self, loss, optimizer, parameters, clip=None, need_update=True):
        self._inner.scale(loss).backward()
        if not need_update:
            return None
        self._inner.unscale_(optimizer)
        parameters = list(parameters)
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(parameters, clip)
        else:
            norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        self._inner.step(optimizer)
        self._inner.update()
        return norm

    def state_dict(self):
        return self._inner.state_dict()

    def load_state_dict(self, state):
        self._inner.load_state_dict(state)


class Vit(nn.Module):
    def __init__(self, size=224, patch=14, dim=1024, depth=24, classes=1000, remat=True):
        super().__init__()
        self.remat = remat
        self.proj = nn.Conv2d(3, dim, patch, patch)
        self.pos = nn.Parameter(torch.randn(1, (size // patch) ** 2, dim) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 16, 4 * dim, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.proj(x).flatten(2).transpose(1, 2) + self.pos
        for blk in self.blocks:
            x = checkpoint(blk, x, use_reentrant=False) if self.remat and self.training else blk(x)
        return self.head(self.norm(x).mean(1))


def train_one_epoch(model, loader, optimizer, scaler, accum, clip):
    model.train()
    optimizer.zero_grad()
    steps = len(loader) // accum * accum
    for i, (x, y) in enumerate(loader):
        if i == steps:
            break
        with torch.cuda.amp.autocast():
            loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True), label_smoothing=0.1)
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(f"loss {value} at batch {i}")
        due = (i + 1) % accum == 0
        norm = scaler(loss / accum, optimizer, model.parameters(), clip=clip, need_update=due)
        if due:
            optimizer.zero_grad()
            if (i + 1) % (100 * accum) == 0:
                print(i + 1, value, norm.item())


def run(loader, epochs=90, accum=4, clip=1.0):
    model = Vit().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    scaler = LossScaler()
    for epoch in range(epochs):
        train_one_epoch(model, loader, optimizer, scaler, accum, clip)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    scaler.state_dict_key: scaler.state_dict(), "epoch": epoch}, f"vit-{epoch:03d}.pt")
