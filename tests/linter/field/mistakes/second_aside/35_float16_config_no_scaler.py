"""
# source: https://github.com/karpathy/nanoGPT/pull/87
# mistake: the configuration trains in float16 autocast but nothing scales the loss; small gradients underflow to zero.
# severity: error
# torch: 2.0+
"""
import math
import os
import time

import numpy as np
import torch

from gpt import GPT, GPTConfig

# ---- settings; the exec of a config file may override them
out_dir = "out-poems"
dataset = "poems"
batch_size = 12
block_size = 512
max_iters = 20_000
warmup_iters = 500
learning_rate = 6e-4
grad_clip = 1.0
device = "cuda"
dtype = "float16"  # the card here has no bfloat16
# ----

os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = torch.amp.autocast(device_type=device, dtype=ptdtype)  # <- here
data = {split: np.memmap(f"data/{dataset}/{split}.bin", dtype=np.uint16, mode="r") for split in ("train", "val")}


def get_batch(split):
    ix = torch.randint(len(data[split]) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[split][i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[split][i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x.to(device), y.to(device)


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * it / warmup_iters
    return 0.1 * learning_rate + 0.45 * learning_rate * (1 + math.cos(math.pi * it / max_iters))


model = GPT(GPTConfig(block_size=block_size)).to(device)
optimizer = model.configure_optimizers(weight_decay=0.1, learning_rate=learning_rate, betas=(0.9, 0.95))

t0 = time.time()
for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    X, Y = get_batch("train")
    with ctx:
        logits, loss = model(X, Y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # <- here
    if grad_clip != 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    if iter_num % 10 == 0:
        print(f"iter {iter_num}: loss {loss.item():.4f}, {1000 * (time.time() - t0):.0f}ms")
        t0 = time.time()
    if iter_num % 2000 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{out_dir}/ckpt.pt")
