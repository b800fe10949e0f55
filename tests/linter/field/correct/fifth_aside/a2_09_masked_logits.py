# why correct: masks use the minimum of the scores' own dtype (or float32 scores), so nothing overflows in float16 and fully hidden rows still give finite softmax
import math

import torch
import torch.nn.functional as F
from torch import nn


def hide_(scores: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min)


class QueryAttention(nn.Module):
    """Masked cross attention of object queries over pixels."""

    def __init__(self, dim, heads):
        super().__init__()
        self.h, self.d = heads, dim // heads
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, queries, pixels, hidden):
        b, nq, c = queries.shape
        q = self.q(queries).view(b, nq, self.h, self.d).transpose(1, 2)
        k, v = self.kv(pixels).view(b, -1, 2, self.h, self.d).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.d)
        att = hide_(scores, hidden[:, None]).softmax(-1)
        out = (att.to(v.dtype) @ v).transpose(1, 2).reshape(b, nq, c)
        return self.o(out)


class MaskDecoder(nn.Module):
    def __init__(self, dim=256, heads=8, layers=6, queries=100, classes=80):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(queries, dim) * 0.02)
        self.layers = nn.ModuleList(QueryAttention(dim, heads) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.cls, self.emb = nn.Linear(dim, classes + 1), nn.Linear(dim, dim)

    def masks(self, q, pix):
        return torch.einsum("bqc,bnc->bqn", self.emb(q), pix)

    def forward(self, pix):
        q = self.queries.expand(len(pix), -1, -1)
        for att, norm in zip(self.layers, self.norms):
            with torch.no_grad():
                hidden = self.masks(q.detach(), pix.detach()).sigmoid() < 0.5
                hidden = hidden & ~hidden.all(-1, keepdim=True)
            q = norm(q + att(q, pix, hidden))
        return self.cls(q), self.masks(q, pix)


def restrict(logits, allowed):
    """Classes outside the image's label set get no probability."""
    return torch.where(allowed[:, None], logits.float(), torch.tensor(-1e9, device=logits.device))


def fit(backbone, decoder, matcher_loss, loader, opt, steps):
    amp = torch.amp.GradScaler("cuda")
    params = [p for g in opt.param_groups for p in g["params"]]
    for _, b in zip(range(steps), loader):
        with torch.autocast("cuda", torch.float16, cache_enabled=False):
            pix = backbone(b["image"].cuda()).flatten(2).transpose(1, 2)
            cls, masks = decoder(pix)
        cls = restrict(cls, b["allowed"].cuda())
        loss = matcher_loss(cls, masks.float(), b["targets"])
        opt.zero_grad(set_to_none=True)
        amp.scale(loss).backward()
        amp.unscale_(opt)
        nn.utils.clip_grad_norm_(params, 0.01)
        amp.step(opt)
        amp.update()
