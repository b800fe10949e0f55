# why correct: the mask value is taken from the dtype of the scores themselves, so it fits float16, and the softmax runs in float32
import torch
from torch import nn
from torch.nn import functional as F


def lowest(t):
    return torch.finfo(t.dtype).min


def masked_softmax(scores, allowed):
    scores = scores.masked_fill(~allowed, lowest(scores))
    return F.softmax(scores, dim=-1, dtype=torch.float32)


class SlateAttention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        assert dim % heads == 0
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, present):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        weights = masked_softmax(scores, present[:, None, None, :])
        return self.o((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))


class SlateRanker(nn.Module):
    def __init__(self, features, dim=128, layers=3):
        super().__init__()
        self.inp = nn.Linear(features, dim)
        self.attn = nn.ModuleList(SlateAttention(dim) for _ in range(layers))
        self.norm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.score = nn.Linear(dim, 1)

    def forward(self, x, present):
        h = self.inp(x)
        for attn, norm in zip(self.attn, self.norm):
            h = h + attn(norm(h), present)
        return self.score(h).squeeze(-1)


def listwise_loss(scores, relevance, present):
    scores = scores.float().masked_fill(~present, -1e9)
    target = relevance.float().masked_fill(~present, -1e9).softmax(-1)
    return -(target * scores.log_softmax(-1)).sum(-1).mean()


def fit(loader, features, epochs=10, lr=5e-4):
    model = SlateRanker(features).cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    scaler = torch.cuda.amp.GradScaler()
    for _ in range(epochs):
        for x, relevance, present in loader:
            x, relevance, present = x.cuda(), relevance.cuda(), present.cuda()
            opt.zero_grad(set_to_none=True)
            with torch.cuda.amp.autocast(dtype=torch.float16):
                scores = model(x, present)
                loss = listwise_loss(scores, relevance, present)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
    return model
