# source: datawhalechina/happy-llm PR #195 https://github.com/datawhalechina/happy-llm/pull/195
# mistake: the chosen dtype (bfloat16 by default) never reaches autocast, which falls back to float16 while the scaler is off for bfloat16
# severity: error
import argparse
import time
from contextlib import nullcontext

import torch
from torch import nn, optim

from chat_model import ChatConfig, ChatTransformer
from corpus import packed_loader


def lr_at(step, total, peak, warm=1000):
    if step < warm:
        return peak * step / warm
    return peak * (0.1 + 0.9 * (1 - (step - warm) / max(1, total - warm)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--device", default="cuda:0")
    ap.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    ap.add_argument("--lr", type=float, default=2e-4)
    ap.add_argument("--accumulate", type=int, default=8)
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--epochs", type=int, default=1)
    args = ap.parse_args()

    on_gpu = args.device.startswith("cuda")
    precision = nullcontext() if not on_gpu else torch.cuda.amp.autocast()  # <- here
    model = ChatTransformer(ChatConfig(dim=1024, layers=18)).to(args.device)
    opt = optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    scaler = torch.cuda.amp.GradScaler(enabled=args.dtype == "float16")
    loader = packed_loader("pretrain.bin", length=512, batch=64)
    total = args.epochs * len(loader)

    start = time.time()
    for epoch in range(args.epochs):
        for i, (x, y, keep) in enumerate(loader):
            x, y, keep = x.to(args.device), y.to(args.device), keep.to(args.device)
            for g in opt.param_groups:
                g["lr"] = lr_at(epoch * len(loader) + i, total, args.lr)
            with precision:  # <- here
                logits = model(x)
                raw = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
                loss = (raw * keep.flatten()).sum() / keep.sum()
                loss = loss / args.accumulate
            scaler.scale(loss).backward()
            if (i + 1) % args.accumulate == 0:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad(set_to_none=True)
            if i % 100 == 0:
                print(f"{i}/{len(loader)} {loss.item() * args.accumulate:.3f} {time.time() - start:.0f}s")
    torch.save(model.state_dict(), "chat.pt")


if __name__ == "__main__":
    main()
