# why correct: -1e9 is only ever added to float32 scores inside an autocast-free region, so nothing overflows float16
import math

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast

NEG = -1e9


class Fp32ScoreAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.d = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    @staticmethod
    def bias(valid):
        return (1.0 - valid.float())[:, None, None, :] * NEG

    def forward(self, x, valid):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, self.d).permute(2, 0, 3, 1, 4)
        with autocast(enabled=False):
            scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(self.d)
            prob = torch.softmax(scores + self.bias(valid), dim=-1)
        y = prob.to(v.dtype) @ v
        return self.out(y.transpose(1, 2).reshape(b, n, -1))


class TrajectoryModel(nn.Module):
    def __init__(self, feat=9, dim=128, heads=8, horizon=12):
        super().__init__()
        self.embed = nn.Linear(feat, dim)
        self.att = Fp32ScoreAttention(dim, heads)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 2 * horizon)
        self.horizon = horizon

    def forward(self, agents, valid):
        h = self.embed(agents)
        h = h + self.att(self.norm(h), valid)
        return self.head(h).unflatten(-1, (self.horizon, 2))


class Trainer:
    def __init__(self, model, lr):
        self.model = model.cuda()
        self.opt = torch.optim.AdamW(model.parameters(), lr=lr)
        self.scaler = GradScaler()

    def loss(self, agents, valid, future):
        with autocast():
            pred = self.model(agents, valid)
        err = (pred.float() - future).norm(dim=-1).mean(dim=-1)
        return (err * valid).sum() / valid.sum().clamp(min=1)

    def step(self, batch):
        agents, valid, future = (t.cuda() for t in batch)
        self.opt.zero_grad(set_to_none=True)
        loss = self.loss(agents, valid, future)
        self.scaler.scale(loss).backward()
        self._clip()
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()

    def _clip(self):
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
