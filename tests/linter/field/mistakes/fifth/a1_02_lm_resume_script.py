# source: allenai/tango issue #154 (same fix: huggingface/transformers PR #11663)
# mistake: the GradScaler's state is neither saved nor restored, so every resumed run starts again at the initial loss scale and growth counter and skips its first steps
# severity: warning
import argparse
import math
import os
import time

import numpy as np
import torch
import torch.nn.functional as F

from nanolm.model import Decoder, DecoderConfig

ap = argparse.ArgumentParser()
ap.add_argument("--data", default="tokens.bin")
ap.add_argument("--out", default="runs/base")
ap.add_argument("--resume", action="store_true")
ap.add_argument("--steps", type=int, default=200_000)
ap.add_argument("--batch", type=int, default=24)
ap.add_argument("--ctx", type=int, default=1024)
ap.add_argument("--lr", type=float, default=6e-4)
ap.add_argument("--save-every", type=int, default=2000)
opts = ap.parse_args()

torch.manual_seed(1234)
dev = "cuda"
tokens = np.memmap(opts.data, dtype=np.uint16, mode="r")


def draw():
    at = torch.randint(len(tokens) - opts.ctx - 1, (opts.batch,))
    rows = [torch.from_numpy(tokens[i : i + opts.ctx + 1].astype(np.int64)) for i in at.tolist()]
    block = torch.stack(rows).pin_memory().to(dev, non_blocking=True)
    return block[:, :-1], block[:, 1:]


def lr_at(step):
    if step < 2000:
        return opts.lr * (step + 1) / 2000
    frac = (step - 2000) / max(1, opts.steps - 2000)
    return opts.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * frac)))


lm = Decoder(DecoderConfig(ctx=opts.ctx)).to(dev)
adam = torch.optim.AdamW(lm.parameters(), lr=opts.lr, betas=(0.9, 0.95), weight_decay=0.1)
gs = torch.amp.GradScaler("cuda")  # <- here
first = 0
ckpt_path = os.path.join(opts.out, "last.pt")

if opts.resume:
    blob = torch.load(ckpt_path, map_location=dev)
    lm.load_state_dict(blob["lm"])
    adam.load_state_dict(blob["adam"])  # <- here
    torch.set_rng_state(blob["rng"].cpu())
    first = blob["step"] + 1
    print(f"resumed at step {first}")

os.makedirs(opts.out, exist_ok=True)
t0 = time.time()
for step in range(first, opts.steps):
    for group in adam.param_groups:
        group["lr"] = lr_at(step)

    x, y = draw()
    with torch.autocast("cuda", dtype=torch.float16):
        logits = lm(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())

    adam.zero_grad(set_to_none=True)
    gs.scale(loss).backward()
    gs.unscale_(adam)
    torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    gs.step(adam)
    gs.update()

    if step % 50 == 0:
        print(f"{step:7d} {loss.item():.4f} {(time.time() - t0):.0f}s")
    if step and step % opts.save_every == 0:
        state = dict(lm=lm.state_dict(), adam=adam.state_dict(), step=step, rng=torch.get_rng_state())  # <- here
        torch.save(state, ckpt_path + ".tmp")  # <- here
        os.replace(ckpt_path + ".tmp", ckpt_path)
