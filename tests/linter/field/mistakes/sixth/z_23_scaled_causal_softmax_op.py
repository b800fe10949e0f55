# source: NVIDIA/apex PR #1188
# mistake: backward is decorated with custom_bwd but forward not with custom_fwd, so the backward pass raises AttributeError: no attribute '_fwd_used_autocast'
# severity: error
import torch
import torch.nn as nn
from torch.amp import GradScaler, autocast, custom_bwd


class CausalSoftmax(torch.autograd.Function):
    """softmax(scale * x) over the lower triangle, computed in float32, returned in x's dtype."""

    @staticmethod
    def forward(ctx, x, scale):  # <- here
        n = x.shape[-1]
        keep = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
        p = (x.float() * scale).masked_fill(~keep, float("-inf")).softmax(-1)
        ctx.save_for_backward(p)
        ctx.scale, ctx.dtype = scale, x.dtype
        return p.to(x.dtype)

    @staticmethod
    @custom_bwd(device_type="cuda")  # <- here
    def backward(ctx, grad):
        (p,) = ctx.saved_tensors
        g = grad.float()
        gx = p * (g - (p * g).sum(-1, keepdim=True)) * ctx.scale
        return gx.to(ctx.dtype), None


class MusicDecoderLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1))
        attn = CausalSoftmax.apply(q @ k.transpose(-1, -2), self.head_dim**-0.5)
        x = x + self.out((attn @ v).transpose(1, 2).reshape(b, t, c))
        return x + self.ff(self.norm2(x))


class MusicLM(nn.Module):
    def __init__(self, vocab=4096, dim=512, depth=6, heads=8, ctx=1024):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(ctx, dim)
        self.layers = nn.Sequential(*[MusicDecoderLayer(dim, heads) for _ in range(depth)])
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        h = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.layers(h))


def fit(batches, lr=3e-4):
    model = MusicLM().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scaler = GradScaler("cuda")
    for i, ids in enumerate(batches):
        ids = ids.cuda()
        with autocast("cuda", dtype=torch.float16):
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if i % 100 == 0:
            print(i, loss.item())
    return model
