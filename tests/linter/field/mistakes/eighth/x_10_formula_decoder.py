# source: bentrevett/pytorch-seq2seq issue #191
# mistake: the attention scores are float16 under autocast and -1e10 cannot be represented there, masked_fill raises an overflow error
# severity: error
"""Image of a formula -> LaTeX."""
import math

import torch
from torch import nn
from torch.optim import Adam


class Attention(nn.Module):
    def __init__(self, dim, heads, dropout=0.1):
        super().__init__()
        assert dim % heads == 0
        self.heads, self.width = heads, dim // heads
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)
        self.to_out = nn.Linear(dim, dim)
        self.drop = nn.Dropout(dropout)

    def split(self, x):
        b, n, _ = x.shape
        return x.view(b, n, self.heads, self.width).transpose(1, 2)

    def forward(self, x, memory, keep=None):
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(memory)), self.split(self.to_v(memory))
        energy = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.width)
        if keep is not None:
            energy = energy.masked_fill(keep == 0, -1e10)  # <- here
        weight = self.drop(torch.softmax(energy, dim=-1))
        mixed = torch.matmul(weight, v).transpose(1, 2).flatten(2)
        return self.to_out(mixed)


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.n1, self.n2, self.n3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.own, self.cross = Attention(dim, heads), Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, memory, keep):
        y = self.n1(x)
        x = x + self.own(y, y, keep)
        x = x + self.cross(self.n2(x), memory)
        return x + self.mlp(self.n3(x))


class FormulaReader(nn.Module):
    def __init__(self, vocab, dim=256, heads=8, depth=4, length=200):
        super().__init__()
        self.eye = nn.Sequential(
            nn.Conv2d(1, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU(), nn.Conv2d(128, dim, 3, 2, 1)
        )
        self.tok = nn.Embedding(vocab, dim, padding_idx=0)
        self.pos = nn.Embedding(length, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.out = nn.Linear(dim, vocab)

    def forward(self, image, ids):
        memory = self.eye(image).flatten(2).transpose(1, 2)
        n = ids.size(1)
        causal = torch.ones(n, n, dtype=torch.bool, device=ids.device).tril()
        keep = (ids != 0)[:, None, None, :] & causal
        h = self.tok(ids) + self.pos(torch.arange(n, device=ids.device))
        for layer in self.layers:
            h = layer(h, memory, keep)
        return self.out(h)


def fit(model, loader, epochs=20):
    model.cuda().train()
    optimizer = Adam(model.parameters(), 3e-4)
    scaler = torch.amp.GradScaler("cuda")
    loss_fn = nn.CrossEntropyLoss(ignore_index=0)
    for epoch in range(epochs):
        for image, ids in loader:
            image, ids = image.cuda(), ids.cuda()
            with torch.autocast("cuda", dtype=torch.float16):
                scores = model(image, ids[:, :-1])
                loss = loss_fn(scores.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        print(f"epoch {epoch} last loss {loss.item():.3f}")
