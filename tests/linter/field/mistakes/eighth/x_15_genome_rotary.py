# source: huggingface/diffusers PR #13922
# mistake: the rotary angles come from a matmul inside the autocast region, which runs in bfloat16 in spite of the float() casts, so far positions fall together
# severity: error
"""Masked-nucleotide pre-training with long windows."""
import torch
import torch.nn as nn
import torch.nn.functional as F

WINDOW = 16384


class RotaryTable(nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        freq = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self.register_buffer("freq", freq, persistent=False)

    def forward(self, position):
        left = position[:, :, None].float()
        right = self.freq[None, None, :].float()
        angle = torch.matmul(left, right)  # <- here
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, cos, sin):
        b, n, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos[:, None], sin[:, None]), rotate(k, cos[:, None], sin[:, None])
        o = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(o.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.n2(x))


class GenomeModel(nn.Module):
    def __init__(self, dim=512, heads=8, depth=12, letters=6):
        super().__init__()
        self.embed = nn.Embedding(letters, dim)
        self.rotary = RotaryTable(dim // heads)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, letters)

    def forward(self, ids):
        position = torch.arange(ids.size(1), device=ids.device)[None]
        cos, sin = self.rotary(position)  # <- here
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h, cos, sin)
        return self.head(self.norm(h))


def corrupt(ids, mask_id=5, rate=0.15):
    chosen = torch.rand(ids.shape, device=ids.device) < rate
    return torch.where(chosen, torch.full_like(ids, mask_id), ids), chosen


def train(windows, steps=100_000, lr=3e-4):
    """`windows` yields LongTensors of shape (batch, WINDOW)."""
    model = GenomeModel().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for step, ids in zip(range(steps), windows):
        ids = ids.cuda(non_blocking=True)
        noisy, chosen = corrupt(ids)
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            scores = model(noisy)  # <- here
            loss = F.cross_entropy(scores[chosen], ids[chosen])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"{step:>7} {loss.item():.4f}")
    return model
