# why correct: the scaler is enabled only for float16 and a disabled scaler passes everything through; its state is stored in a loop over all stateful objects.
import math
import os
import time
from contextlib import nullcontext

import numpy as np
import torch

from model import GPT, GPTConfig

out_dir = "out-genome"
data_dir = "data/genome"
init_from = "scratch"
dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float16"
batch_size, block_size, gradient_accumulation_steps = 12, 1024, 40
learning_rate, min_lr, warmup_iters, max_iters = 6e-4, 6e-5, 2000, 100000
weight_decay, beta1, beta2, grad_clip = 1e-1, 0.9, 0.95, 1.0
eval_interval, eval_iters, log_interval = 1000, 100, 10
device = "cuda"
config = {k: v for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, str))}

torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = nullcontext() if device == "cpu" else torch.amp.autocast(device_type="cuda", dtype=ptdtype,
                                                               enabled=dtype != "float32")


def get_batch(split):
    data = np.memmap(os.path.join(data_dir, f"{split}.bin"), dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i:i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1:i + 1 + block_size].astype(np.int64)) for i in ix])
    return x.to(device, non_blocking=True), y.to(device, non_blocking=True)


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * min(ratio, 1.0))) * (learning_rate - min_lr)


model = GPT(GPTConfig(block_size=block_size)).to(device)
scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device)
stateful = {"model": model, "optimizer": optimizer, "scaler": scaler}
iter_num, best_val = 0, 1e9
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device)
    for name, obj in stateful.items():
        obj.load_state_dict(checkpoint[name])
    iter_num, best_val = checkpoint["iter_num"], checkpoint["best_val"]
    checkpoint = None
run = torch.compile(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    out = {}
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            with ctx:
                _, loss = run(*get_batch(split))
            losses[k] = loss.item()
        out[split] = losses.mean().item()
    model.train()
    return out


tic = time.time()
while iter_num <= max_iters:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(iter_num, losses)
        if losses["val"] < best_val:
            best_val = losses["val"]
            blob = {name: obj.state_dict() for name, obj in stateful.items()}
            torch.save({**blob, "iter_num": iter_num, "best_val": best_val, "config": config}, f"{out_dir}/ckpt.pt")
    for _ in range(gradient_accumulation_steps):
        with ctx:
            _, loss = run(*get_batch("train"))
            loss = loss / gradient_accumulation_steps
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0:
        print(f"{iter_num} loss {loss.item() * gradient_accumulation_steps:.4f} {time.time() - tic:.1f}s")
    iter_num += 1
