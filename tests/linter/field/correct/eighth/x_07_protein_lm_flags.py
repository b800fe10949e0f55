# why correct: the dtype flag decides both the autocast dtype and whether the scaler does anything (only for float16)
import math
import os
import time
from contextlib import nullcontext

import numpy as np
import torch

from plm.model import ProteinLM, ProteinLMConfig

# defaults, may be changed by configurator.py
out_dir = "out"
dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float16"
device = "cuda"
block_size = 512
batch_size = 24
gradient_accumulation_steps = 10
learning_rate = 4e-4
max_iters = 100_000
warmup_iters = 2000
grad_clip = 1.0
init_from = "scratch"
exec(open("configurator.py").read())

os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1234)
device_type = "cuda" if "cuda" in device else "cpu"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = nullcontext() if device_type == "cpu" or dtype == "float32" else torch.amp.autocast(device_type, dtype=ptdtype)

tokens = np.memmap("uniref.bin", dtype=np.uint8, mode="r")


def get_batch():
    ix = torch.randint(len(tokens) - block_size - 1, (batch_size,))
    x = torch.stack([torch.from_numpy(tokens[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x.to(device, non_blocking=True), y.to(device, non_blocking=True)


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * ratio)))


model = ProteinLM(ProteinLMConfig(block_size=block_size, vocab_size=32)).to(device)
scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
iter_num = 0
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scaler.load_state_dict(checkpoint["scaler"])
    iter_num = checkpoint["iter_num"]

X, Y = get_batch()
t0 = time.time()
while iter_num < max_iters:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    for micro in range(gradient_accumulation_steps):
        with ctx:
            _, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num % 1000 == 0:
        print(f"{iter_num}: {loss.item() * gradient_accumulation_steps:.4f} ({time.time() - t0:.0f}s)")
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "iter_num": iter_num,
        }
        torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
