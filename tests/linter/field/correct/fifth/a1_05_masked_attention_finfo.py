# why correct: the fill value is taken from the scores' own dtype, a minus infinity is used only where every row keeps one entry, and the huge -1e9 touches a float32 tensor only
import torch
import torch.nn as nn
import torch.nn.functional as F


class CrossAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x, memory, pad):
        b, t, d = x.shape
        q = self.q(x).view(b, t, self.heads, -1).transpose(1, 2)
        k, v = self.kv(memory).view(b, memory.size(1), 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
        scores = scores.masked_fill(pad[:, None, None], torch.finfo(scores.dtype).min)
        y = scores.softmax(-1).to(v.dtype) @ v
        return self.o(y.transpose(1, 2).reshape(b, t, d))


class Captioner(nn.Module):
    def __init__(self, vocab, dim=512, heads=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.self_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.cross = CrossAttention(dim, heads)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.out = nn.Linear(dim, vocab)

    def forward(self, words, regions, region_pad):
        t = words.size(1)
        future = torch.full((t, t), float("-inf"), device=words.device).triu(1)
        x = self.embed(words)
        h = self.norms[0](x)
        x = x + self.self_attn(h, h, h, attn_mask=future, need_weights=False)[0]
        x = x + self.cross(self.norms[1](x), regions, region_pad)
        return self.out(self.norms[2](x))


def constrained_nll(logits, target, banned):
    logits = logits.float().masked_fill(banned[:, None, :], -1e9)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)


def fit(net, batches, epochs=5):
    net = net.cuda().train()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(epochs):
        for batch in batches:
            words, regions, pad, banned = (batch[k].cuda() for k in ("words", "regions", "pad", "banned"))
            with torch.autocast("cuda", dtype=torch.float16):
                logits = net(words[:, :-1], regions, pad)
                loss = constrained_nll(logits, words[:, 1:], banned)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
    return net
