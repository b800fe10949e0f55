# source: https://github.com/mosaicml/llm-foundry/pull/302
# mistake: autocast is given "cuda:0" instead of a device type ("cuda"), which raises a RuntimeError
# severity: error
import math
import os

import torch
import torch.nn.functional as F
from torch import nn

batch_size = 64
context = 256
max_iters = 5000
eval_interval = 500
learning_rate = 6e-4
device = "cuda:0"  # <- here
torch.manual_seed(1337)

text = open("recipes.txt", encoding="utf-8").read()
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text], dtype=torch.long)
split = int(0.9 * len(data))
splits = {"train": data[:split], "val": data[split:]}

amp_ctx = torch.autocast(device_type=device, dtype=torch.bfloat16)  # <- here


class CharLM(nn.Module):
    def __init__(self, vocab, dim=384, heads=6, layers=6):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(context, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx, targets):
        n = idx.size(1)
        mask = torch.triu(torch.ones(n, n, dtype=torch.bool, device=idx.device), 1)
        x = self.tok(idx) + self.pos(torch.arange(n, device=idx.device))
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        logits = self.head(self.ln(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def get_batch(name):
    src = splits[name]
    ix = torch.randint(len(src) - context - 1, (batch_size,))
    x = torch.stack([src[i : i + context] for i in ix])
    y = torch.stack([src[i + 1 : i + context + 1] for i in ix])
    return x.to(device), y.to(device)


@torch.no_grad()
def estimate(model, iters=50):
    model.eval()
    out = {}
    for name in splits:
        vals = torch.zeros(iters)
        for k in range(iters):
            x, y = get_batch(name)
            with amp_ctx:
                vals[k] = model(x, y).item()
        out[name] = vals.mean().item()
    model.train()
    return out


model = CharLM(len(chars)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
for it in range(max_iters):
    for g in optimizer.param_groups:
        g["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * it / max_iters))
    if it % eval_interval == 0:
        print(it, estimate(model))
    x, y = get_batch("train")
    with amp_ctx:
        loss = model(x, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
os.makedirs("out", exist_ok=True)
torch.save(model.state_dict(), "out/charlm.pt")
