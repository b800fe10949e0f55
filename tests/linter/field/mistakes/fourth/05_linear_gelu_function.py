# re-expressed from github.com/pytorch/ao issue 4616: a hand-written backward multiplied a 16-bit gradient with the float32 weight it had saved under autocast
import torch
import torch.nn as nn
import torch.nn.functional as F


class LinearGelu(torch.autograd.Function):  # <- here
    """gelu(x W^T + b) that keeps the pre-activation only, not the activation (saves one hidden-sized tensor)."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        h = F.linear(x, weight, bias)
        ctx.save_for_backward(x, weight, h)
        return F.gelu(h, approximate="tanh")

    @staticmethod
    def backward(ctx, grad_out):
        x, weight, h = ctx.saved_tensors
        grad_h = torch.ops.aten.gelu_backward(grad_out, h, approximate="tanh")
        grad_x = grad_h @ weight  # <- here
        flat = grad_h.flatten(0, -2)
        grad_w = flat.t() @ x.flatten(0, -2)  # <- here
        return grad_x, grad_w, flat.sum(0)


class LeanMLP(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(hidden, dim) * dim ** -0.5)
        self.b1 = nn.Parameter(torch.zeros(hidden))
        self.proj = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.proj(LinearGelu.apply(x, self.w1, self.b1))


class Layer(nn.Module):
    def __init__(self, dim=512, heads=8):
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = LeanMLP(dim, 4 * dim)
        self.heads = heads

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        return x + self.mlp(self.n2(x))


class CharLM(nn.Module):
    def __init__(self, vocab, dim=512, depth=6, ctx=256):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(ctx, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, idx):
        h = self.tok(idx) + self.pos(torch.arange(idx.size(1), device=idx.device))
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


def batches(data, ctx, bs, steps, device):
    for _ in range(steps):
        ix = torch.randint(len(data) - ctx - 1, (bs,))
        chunk = torch.stack([data[i:i + ctx + 1] for i in ix]).to(device)
        yield chunk[:, :-1], chunk[:, 1:]


def main(path="input.txt", steps=5000, ctx=256, bs=64, device="cuda"):
    text = open(path, encoding="utf-8").read()
    vocab = sorted(set(text))
    stoi = {c: i for i, c in enumerate(vocab)}
    data = torch.tensor([stoi[c] for c in text])
    model = CharLM(len(vocab), ctx=ctx).to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scaler = torch.amp.GradScaler("cuda")
    for step, (x, y) in enumerate(batches(data, ctx, bs, steps, device)):
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        if step % 100 == 0:
            print(step, round(loss.item(), 4))


if __name__ == "__main__":
    main()
