# source: https://github.com/karpathy/nanoGPT/issues/206
# mistake: gradients of several micro steps are summed without dividing the loss by their number, so the step (and the clip) sees a gradient that many times too large.
# severity: error
# torch: any
import os
from contextlib import nullcontext

import numpy as np
import torch

from model import GPT, GPTConfig

batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5
max_iters = 60000
grad_clip = 1.0
device = "cuda"
dtype = "float16"

ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = nullcontext() if dtype == "float32" else torch.amp.autocast(device_type=device, dtype=ptdtype)
tokens = np.memmap(os.path.join("data", "openwebtext", "train.bin"), dtype=np.uint16, mode="r")


def get_batch():
    ix = torch.randint(len(tokens) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(tokens[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)


model = GPT(GPTConfig(block_size=block_size)).to(device)
scaler = torch.amp.GradScaler(device, enabled=(dtype == "float16"))
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)

X, Y = get_batch()
for it in range(max_iters):
    for micro_step in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
        X, Y = get_batch()
        scaler.scale(loss).backward()  # <- here
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if it % 10 == 0:
        print(f"iter {it}: loss {loss.item():.4f}")
