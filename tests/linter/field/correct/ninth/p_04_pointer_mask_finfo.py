# why correct: masked logits use the lowest value of their own dtype, so nothing overflows in float16, and softmax runs in float32
import torch
import torch.nn as nn
import torch.nn.functional as F


def mask_out(logits, keep):
    return logits.masked_fill(~keep, torch.finfo(logits.dtype).min)


class Pointer(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.scale = dim ** -0.5

    def forward(self, query, keys, keep):
        raw = torch.bmm(self.k(keys), self.q(query).unsqueeze(-1)).squeeze(-1) * self.scale
        return mask_out(10.0 * torch.tanh(raw), keep)


class TourPolicy(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.embed = nn.Linear(2, dim)
        layer = nn.TransformerEncoderLayer(dim, 8, 512, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 3)
        self.ctx = nn.Linear(2 * dim, dim)
        self.pointer = Pointer(dim)

    def forward(self, xy):
        B, N, _ = xy.shape
        h = self.enc(self.embed(xy))
        keep = torch.ones(B, N, dtype=torch.bool, device=xy.device)
        rows = torch.arange(B, device=xy.device)
        last, tour, logp = h.mean(1), [], 0.0
        graph = h.mean(1)
        for _ in range(N):
            logits = self.pointer(self.ctx(torch.cat([graph, last], -1)), h, keep)
            dist = torch.distributions.Categorical(logits=logits.float())
            a = dist.sample()
            logp = logp + dist.log_prob(a)
            keep = keep.scatter(1, a[:, None], False)
            last = h[rows, a]
            tour.append(a)
        return torch.stack(tour, 1), logp


def length(xy, tour):
    path = xy.gather(1, tour[..., None].expand(-1, -1, 2))
    return (path - path.roll(-1, 1)).norm(dim=-1).sum(1)


def reinforce(steps=10000, batch=512, n=20, device="cuda"):
    policy = TourPolicy().to(device)
    opt = torch.optim.Adam(policy.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    base = None
    for s in range(steps):
        xy = torch.rand(batch, n, 2, device=device)
        with torch.autocast("cuda", dtype=torch.float16):
            tour, logp = policy(xy)
        cost = length(xy, tour)
        base = cost.mean() if base is None else 0.9 * base + 0.1 * cost.mean()
        loss = ((cost - base).detach() * logp).mean()
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        if s % 100 == 0:
            print(s, cost.mean().item())
