# source: datawhalechina/happy-llm PR #215
# mistake: the bfloat16 choice never reaches autocast, which therefore runs in float16, while the scaler is off because the dtype is "bfloat16"
# severity: error
import argparse
import math
from contextlib import nullcontext

import torch
import torch.nn as nn
import torch.nn.functional as F


def options():
    p = argparse.ArgumentParser()
    p.add_argument("--tokens", default="corpus.bin")
    p.add_argument("--dim", type=int, default=512)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--vocab", type=int, default=32000)
    p.add_argument("--block", type=int, default=512)
    p.add_argument("--bs", type=int, default=32)
    p.add_argument("--steps", type=int, default=50000)
    p.add_argument("--lr", type=float, default=6e-4)
    p.add_argument("--device", default="cuda")
    p.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])  # <- here
    return p.parse_args()


class TinyLM(nn.Module):
    def __init__(self, vocab, dim, layers, block):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(block, dim)
        layer = nn.TransformerEncoderLayer(dim, dim // 64, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        n = ids.size(1)
        causal = nn.Transformer.generate_square_subsequent_mask(n, device=ids.device)
        h = self.tok(ids) + self.pos(torch.arange(n, device=ids.device))
        return self.out(self.norm(self.blocks(h, mask=causal, is_causal=True)))


def sample(data, bs, block, device):
    at = torch.randint(len(data) - block - 1, (bs,))
    x = torch.stack([data[i : i + block] for i in at]).long()
    y = torch.stack([data[i + 1 : i + block + 1] for i in at]).long()
    return x.to(device), y.to(device)


def cosine(step, total, peak, warm=500):
    if step < warm:
        return peak * (step + 1) / warm
    return 0.1 * peak + 0.45 * peak * (1 + math.cos(math.pi * (step - warm) / (total - warm)))


def main():
    args = options()
    data = torch.from_file(args.tokens, dtype=torch.int32, size=10**8)
    model = TinyLM(args.vocab, args.dim, args.layers, args.block).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    half = args.dtype == "bfloat16"
    ctx = torch.cuda.amp.autocast() if half else nullcontext()  # <- here

    for step in range(args.steps):
        for g in optimizer.param_groups:
            g["lr"] = cosine(step, args.steps, args.lr)
        x, y = sample(data, args.bs, args.block, args.device)
        with ctx:  # <- here
            logits = model(x)
            loss = F.cross_entropy(logits.view(-1, args.vocab), y.view(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # <- here
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(step, round(loss.item(), 4))
    torch.save(model.state_dict(), "tinylm.pt")


if __name__ == "__main__":
    main()
