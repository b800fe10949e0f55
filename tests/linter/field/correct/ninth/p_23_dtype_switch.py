# why correct: the scaler is enabled only when the chosen dtype is float16, so bfloat16 and float32 runs pass through it unchanged; the global loop scales, unscales, clips and steps in order
import math
import sys
import time
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float16"
device = "cuda"
batch_size, block, micro_steps = 12, 512, 5
max_iters, warmup, peak, floor = 100_000, 2000, 6e-4, 6e-5
grad_clip = 1.0
eval_every = 500
for arg in sys.argv[1:]:
    key, val = arg.lstrip("-").split("=")
    globals()[key] = type(globals()[key])(val)

ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = nullcontext() if dtype == "float32" else torch.amp.autocast(device_type=device, dtype=ptdtype)
scaler = torch.amp.GradScaler(device, enabled=(dtype == "float16"))


class GPTish(nn.Module):
    def __init__(self, vocab=50304, dim=768):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(block, dim)
        layer = nn.TransformerEncoderLayer(dim, 12, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 12, nn.LayerNorm(dim), enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.emb.weight
        nn.init.normal_(self.emb.weight, std=0.02)

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), device=x.device)
        h = self.emb(x) + self.pos.weight[: x.size(1)]
        logits = self.head(self.body(h, mask=mask, is_causal=True))
        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), y.reshape(-1))


def get_batch(split):
    data = np.memmap(f"{split}.bin", dtype=np.uint16, mode="r")
    at = torch.randint(len(data) - block - 1, (batch_size,))
    rows = torch.stack([torch.from_numpy(data[i:i + block + 1].astype(np.int64)) for i in at])
    rows = rows.pin_memory().to(device, non_blocking=True)
    return rows[:, :-1], rows[:, 1:]


def lr_at(it):
    if it < warmup:
        return peak * (it + 1) / warmup
    r = min((it - warmup) / (max_iters - warmup), 1.0)
    return floor + 0.5 * (1 + math.cos(math.pi * r)) * (peak - floor)


@torch.no_grad()
def estimate(model, n=50):
    model.eval()
    total = 0.0
    for _ in range(n):
        with ctx:
            total += model(*get_batch("val")).item()
    model.train()
    return total / n


torch.backends.cuda.matmul.allow_tf32 = True
model = GPTish().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
t0 = time.time()
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = lr_at(it)
    if it % eval_every == 0:
        print(f"iter {it} val {estimate(model):.4f}")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "scaler": scaler.state_dict(), "iter": it}, "gptish.pt")
    for _ in range(micro_steps):
        x, y = get_batch("train")
        with ctx:
            loss = model(x, y) / micro_steps
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if it % 10 == 0:
        print(it, loss.item() * micro_steps, f"{time.time() - t0:.1f}s")
