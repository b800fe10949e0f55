# why correct: the angle matmul runs in float32 because autocast is locally disabled; only the finished cos and sin are cast to the compute type
import torch
import torch.nn as nn
import torch.nn.functional as F


class RotaryTable(nn.Module):
    inv: torch.Tensor

    def __init__(self, head_dim, base=10_000.0):
        super().__init__()
        self.register_buffer(
            "inv", base ** (-torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim), persistent=False
        )

    @torch.no_grad()
    def forward(self, like, pos):
        with torch.autocast(device_type=like.device.type, enabled=False):
            angle = pos.float()[:, :, None] @ self.inv.float()[None, None, :]
            angle = angle.repeat(1, 1, 2)
            cos, sin = angle.cos(), angle.sin()
        return cos.to(like.dtype).unsqueeze(1), sin.to(like.dtype).unsqueeze(1)


def turn(x, cos, sin):
    half = x.size(-1) // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + swapped * sin


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.inp, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.table = RotaryTable(dim // heads)

    def forward(self, x, pos):
        b, t, d = x.shape
        q, k, v = self.inp(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        cos, sin = self.table(v, pos)
        y = F.scaled_dot_product_attention(turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.a, self.b = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))

    def forward(self, x, pos):
        x = x + self.attn(self.a(x), pos)
        return x + self.mlp(self.b(x))


class ProteinLM(nn.Module):
    def __init__(self, dim=640, depth=20, heads=10, alphabet=33):
        super().__init__()
        self.e = nn.Embedding(alphabet, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.h = nn.Linear(dim, alphabet)

    def forward(self, ids):
        pos = torch.arange(ids.size(1), device=ids.device).expand_as(ids)
        x = self.e(ids)
        for block in self.blocks:
            x = block(x, pos)
        return self.h(x)


def train(loader, steps):
    net = ProteinLM().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=4e-4, weight_decay=0.01)
    for _, ids in zip(range(steps), loader):
        ids = ids.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=1)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
    return net
