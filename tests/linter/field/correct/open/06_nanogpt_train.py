# style of: karpathy/nanoGPT:train.py
# torch: 2.0+
import os
from contextlib import nullcontext

import torch

from model import TinyGPT, TinyGPTConfig
from data import get_batch

out_dir = "out"
init_from = "scratch"  # or "resume"
gradient_accumulation_steps = 8
max_iters = 2000
eval_interval = 250
grad_clip = 1.0
device = "cuda"
dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float16"
compile_model = True

device_type = "cuda" if "cuda" in device else "cpu"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, dtype=ptdtype)

model = TinyGPT(TinyGPTConfig()).to(device)
# a no-op unless the forward runs in float16
scaler = torch.cuda.amp.GradScaler(enabled=(dtype == "float16"))
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
iter_num = 0

if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    if checkpoint["scaler"]:  # {} when it was saved by a bfloat16 run
        scaler.load_state_dict(checkpoint["scaler"])
    iter_num = checkpoint["iter_num"]
    checkpoint = None

raw_model = model
if compile_model:
    model = torch.compile(model)


@torch.no_grad()
def estimate_loss(batches=50):
    model.eval()
    losses = torch.zeros(batches)
    for k in range(batches):
        X, Y = get_batch("val", device)
        with ctx:
            _, loss = model(X, Y)
        losses[k] = loss.item()
    model.train()
    return losses.mean()


X, Y = get_batch("train", device)
while iter_num <= max_iters:
    if iter_num % eval_interval == 0:
        print(f"step {iter_num}: val {estimate_loss():.4f}")
        torch.save(
            {
                "model": raw_model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
                "iter_num": iter_num,
            },
            os.path.join(out_dir, "ckpt.pt"),
        )
    for micro_step in range(gradient_accumulation_steps):
        with ctx:
            _, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train", device)
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
