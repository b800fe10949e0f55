# source: EleutherAI/gpt-neox#1003
# mistake: positions and inverse frequencies are multiplied in bfloat16, so rotary angles of long positions are rounded to whole units and the embedding is wrong
# severity: warning
import torch
import torch.nn as nn
import torch.nn.functional as F


class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0, dtype=torch.bfloat16):
        super().__init__()
        self.dtype = dtype
        inv = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        self.register_buffer("inv_freq", inv, persistent=False)
        self.cached = None

    def tables(self, length, device):
        if self.cached is None or self.cached[0].size(0) < length:
            t = torch.arange(length, device=device, dtype=torch.bfloat16)  # <- here
            freqs = torch.outer(t, self.inv_freq.to(torch.bfloat16))  # <- here
            emb = torch.cat((freqs, freqs), dim=-1)
            self.cached = (emb.cos(), emb.sin())  # <- here
        return self.cached[0][:length], self.cached[1][:length]


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.rot = Rotary(dim // heads)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        cos, sin = self.rot.tables(T, x.device)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, D))
        return x + self.ff(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, vocab=50304, dim=768, heads=12, depth=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


def pretrain(loader, steps, device="cuda"):
    net = Decoder().to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    for step, ids in zip(range(steps), loader):
        ids = ids.to(device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = net(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
    return net
