# source: Modalities/modalities PR #462 https://github.com/Modalities/modalities/pull/462
# mistake: rotary angles are formed from bfloat16 frequencies and positions, so phases at long context are off by whole radians
# severity: warning
import torch
import torch.nn as nn
import torch.nn.functional as F


class Rotary(nn.Module):
    def __init__(self, head_dim, base=10_000.0):
        super().__init__()
        freq = base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        self.register_buffer("freq", freq, persistent=False)

    def tables(self, length, like):
        pos = torch.arange(length, device=like.device, dtype=like.dtype)  # <- here
        angle = torch.outer(pos, self.freq.to(like.dtype))  # <- here
        angle = torch.cat([angle, angle], dim=-1)  # <- here
        return angle.cos(), angle.sin()  # <- here

    def forward(self, q, k):
        cos, sin = self.tables(q.size(-2), q)
        return self.spin(q, cos, sin), self.spin(k, cos, sin)

    @staticmethod
    def spin(x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-b, a], dim=-1) * sin


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.rot = Rotary(dim // heads)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = self.rot(q, k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class LongLM(nn.Module):
    def __init__(self, vocab=50304, dim=1024, depth=12, heads=16):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def train(stream, steps=100_000):
    lm = LongLM().cuda()
    opt = torch.optim.AdamW(lm.parameters(), 3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    for step, ids in zip(range(steps), stream):
        ids = ids.cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = lm(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)


if __name__ == "__main__":
    from shards import token_stream

    train(token_stream(length=8192))
