# why correct: the pass without gradients has an autocast region of its own with the cache off, so the second pass makes its weight casts with a graph
import random

import torch
import torch.nn as nn
import torch.nn.functional as F


class LayoutDenoiser(nn.Module):
    def __init__(self, kinds=25, dim=256, depth=6, heads=8):
        super().__init__()
        self.kind = nn.Embedding(kinds, dim)
        self.box = nn.Linear(8, dim)
        self.level = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.out = nn.Linear(dim, 4)

    def forward(self, boxes, previous, kinds, level, pad):
        h = self.box(torch.cat([boxes, previous], -1)) + self.kind(kinds) + self.level(level[:, None])[:, None]
        return self.out(self.body(h, src_key_padding_mask=pad)).float()


def alpha_sigma(t):
    angle = 0.5 * torch.pi * t
    return angle.cos()[:, None, None], angle.sin()[:, None, None]


class SelfConditioned:
    def __init__(self, model, rate=0.5, dtype=torch.float16):
        self.model = model
        self.rate = rate
        self.dtype = dtype

    def guess(self, noisy, kinds, t, pad):
        zero = torch.zeros_like(noisy)
        if random.random() >= self.rate:
            return zero
        with torch.no_grad(), torch.autocast("cuda", dtype=self.dtype, cache_enabled=False):
            return self.model(noisy, zero, kinds, t, pad)

    def loss(self, boxes, kinds, pad):
        t = torch.rand(len(boxes), device=boxes.device)
        a, s = alpha_sigma(t)
        noisy = a * boxes + s * torch.randn_like(boxes)
        previous = self.guess(noisy, kinds, t, pad)
        with torch.autocast("cuda", dtype=self.dtype):
            clean = self.model(noisy, previous, kinds, t, pad)
        keep = (~pad).float()
        err = F.smooth_l1_loss(clean, boxes, reduction="none").mean(-1)
        return (err * keep).sum() / keep.sum()


class Amp:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def __call__(self, loss, params, limit=1.0):
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(params, limit)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def train(loader, epochs=200):
    model = LayoutDenoiser().cuda()
    params = list(model.parameters())
    objective = SelfConditioned(model)
    apply = Amp(torch.optim.AdamW(params, 2e-4, weight_decay=1e-3))
    for epoch in range(epochs):
        model.train()
        for boxes, kinds, pad in loader:
            loss = objective.loss(boxes.cuda(), kinds.cuda(), pad.cuda())
            apply(loss, params)
        print(f"{epoch}: {loss.item():.5f}")
    torch.save(model.state_dict(), "layout.pt")
