# source: datawhalechina/happy-llm pull request #215
# mistake: --dtype bfloat16 switches the GradScaler off but isn't passed to autocast, which then runs in float16: fp16 training without loss scaling
# severity: error
import argparse
import contextlib
import math
import os
import time

import numpy as np
import torch
from torch import optim

from dialect.model import DialectConfig, DialectLM


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="data/tokens.bin")
    p.add_argument("--out", default="out")
    p.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    p.add_argument("--batch", type=int, default=24)
    p.add_argument("--block", type=int, default=1024)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--steps", type=int, default=60_000)
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--warmup", type=int, default=1000)
    p.add_argument("--save-every", type=int, default=2000)
    return p.parse_args()


class TokenStream:
    def __init__(self, path, block, batch):
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.block, self.batch = block, batch

    def __call__(self):
        at = np.random.randint(0, len(self.tokens) - self.block - 1, self.batch)
        rows = np.stack([self.tokens[i:i + self.block + 1] for i in at]).astype(np.int64)
        t = torch.from_numpy(rows).pin_memory().cuda(non_blocking=True)
        return t[:, :-1], t[:, 1:]


def lr_at(step, a):
    if step < a.warmup:
        return a.lr * (step + 1) / a.warmup
    frac = (step - a.warmup) / max(1, a.steps - a.warmup)
    return 0.1 * a.lr + 0.45 * a.lr * (1 + math.cos(math.pi * frac))


def main():
    args = get_args()
    os.makedirs(args.out, exist_ok=True)
    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = True

    if args.dtype == "float32":
        amp_ctx = contextlib.nullcontext()
    else:
        amp_ctx = torch.cuda.amp.autocast()  # <- here
    scaler = torch.cuda.amp.GradScaler(enabled=(args.dtype == "float16"))  # <- here

    model = DialectLM(DialectConfig(block_size=args.block)).cuda()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    other = [p for p in model.parameters() if p.dim() < 2]
    opt = optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}],
                      lr=args.lr, betas=(0.9, 0.95))
    batch = TokenStream(args.data, args.block, args.batch)

    tick = time.time()
    for step in range(args.steps):
        for g in opt.param_groups:
            g["lr"] = lr_at(step, args)
        shown = 0.0
        for _ in range(args.accum):
            x, y = batch()
            with amp_ctx:  # <- here
                loss = model(x, y) / args.accum
            scaler.scale(loss).backward()
            shown += loss.item()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)

        if step % 20 == 0:
            print(f"step {step} loss {shown:.3f} {time.time() - tick:.1f}s", flush=True)
            tick = time.time()
        if step and step % args.save_every == 0:
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(),
                        "scaler": scaler.state_dict(), "step": step, "args": vars(args)},
                       os.path.join(args.out, "ckpt.pt"))


if __name__ == "__main__":
    main()
