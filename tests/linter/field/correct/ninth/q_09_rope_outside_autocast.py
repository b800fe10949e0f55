# why correct: the angles are computed in float32 with autocast disabled and only the finished cos/sin (values in [-1, 1]) are cast down
import torch
import torch.nn as nn
import torch.nn.functional as F


class RopeTable(nn.Module):
    def __init__(self, head_dim, theta=500_000.0):
        super().__init__()
        self.head_dim, self.theta = head_dim, theta

    @torch.no_grad()
    def forward(self, positions, dtype):
        with torch.autocast(device_type=positions.device.type, enabled=False):
            idx = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float32)
            freq = self.theta ** (-idx / self.head_dim)
            angle = positions.to(torch.float32)[..., None] * freq
            return angle.cos().to(dtype)[:, None], angle.sin().to(dtype)[:, None]


def turn(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        f = x.float()
        return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = RMSNorm(dim), RMSNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w2 = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x, rope):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = turn(q, *rope), turn(k, *rope)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.w2(F.silu(self.w1(self.n2(x))))


class CodeModel(nn.Module):
    def __init__(self, vocab, dim=768, depth=12, heads=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rope = RopeTable(dim // heads)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = RMSNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, ids, positions):
        x = self.emb(ids)
        rope = self.rope(positions, torch.bfloat16)
        for block in self.blocks:
            x = block(x, rope)
        return self.head(self.norm(x))


def train(batches, vocab):
    model = CodeModel(vocab).cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    for ids, positions in batches:
        ids, positions = ids.cuda(), positions.cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(ids[:, :-1], positions[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
    return model
