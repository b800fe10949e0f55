# why correct: the mask value is the minimum of the scores' own dtype, so it fits float16, and a second mask uses -inf which every float format has
import math

import torch
import torch.nn as nn


class Pointer(nn.Module):
    def __init__(self, dim, heads=8):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)
        self.point = nn.Linear(dim, dim, bias=False)

    def forward(self, query, nodes, closed):
        b, n, d = nodes.shape
        h = self.heads
        q = self.q(query).view(b, 1, h, d // h).transpose(1, 2)
        k = self.k(nodes).view(b, n, h, d // h).transpose(1, 2)
        v = self.v(nodes).view(b, n, h, d // h).transpose(1, 2)
        scores = q @ k.transpose(-1, -2) / math.sqrt(d // h)
        scores = scores.masked_fill(closed[:, None, None, :], torch.finfo(scores.dtype).min)
        glimpse = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, 1, d))
        logits = 10 * torch.tanh((glimpse @ self.point(nodes).transpose(1, 2)).squeeze(1) / math.sqrt(d))
        return logits.masked_fill(closed, float("-inf"))


class Tour(nn.Module):
    def __init__(self, dim=128, depth=3):
        super().__init__()
        self.inp = nn.Linear(2, dim)
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(dim, 8, 512, batch_first=True), depth)
        self.step = nn.Linear(2 * dim, dim)
        self.ptr = Pointer(dim)

    def forward(self, xy, greedy=False):
        h = self.enc(self.inp(xy))
        b, n, _ = h.shape
        closed = torch.zeros(b, n, dtype=torch.bool, device=xy.device)
        last, mean = h[:, 0], h.mean(1)
        closed[:, 0] = True
        path, logp = [torch.zeros(b, dtype=torch.long, device=xy.device)], 0.0
        for _ in range(n - 1):
            logits = self.ptr(self.step(torch.cat([last, mean], -1))[:, None], h, closed.clone())
            lp = logits.float().log_softmax(-1)
            pick = lp.argmax(-1) if greedy else torch.multinomial(lp.exp(), 1).squeeze(1)
            logp = logp + lp.gather(1, pick[:, None]).squeeze(1)
            closed = closed.scatter(1, pick[:, None], True)
            last = h[torch.arange(b, device=xy.device), pick]
            path.append(pick)
        return torch.stack(path, 1), logp


def length(xy, path):
    p = xy.gather(1, path[..., None].expand(-1, -1, 2))
    return (p - p.roll(1, dims=1)).norm(dim=-1).sum(1)


def reinforce(steps=100_000, batch=512, n=50):
    model = Tour().cuda()
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    baseline = None
    for i in range(steps):
        xy = torch.rand(batch, n, 2, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            path, logp = model(xy)
        cost = length(xy, path)
        baseline = cost.mean() if baseline is None else 0.9 * baseline + 0.1 * cost.mean()
        loss = ((cost - baseline) * logp).mean()
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
