"""
# style of: jingyaogong/minimind:trainer/train_pretrain.py
# correct: one helper decides dtype and scaler together, enabled for float16 only; the rest of the window at the epoch's end is rescaled, then unscaled, clipped and stepped.
# torch: 2.3+
"""
import argparse
import contextlib
import math

import torch
import torch.nn.functional as F

from minillm import MiniLM, PretrainRows


def precision(device: str, wanted: str):
    """-> (context factory, scaler); bfloat16 needs no scaling, so the scaler is a pass-through then."""
    if not device.startswith("cuda") or wanted == "float32":
        return contextlib.nullcontext, torch.amp.GradScaler("cuda", enabled=False)
    if wanted == "bfloat16" and not torch.cuda.is_bf16_supported():
        wanted = "float16"
    dtype = getattr(torch, wanted)
    return (lambda: torch.autocast("cuda", dtype=dtype)), torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)


def get_lr(step, total, lr):
    return lr / 10 + 0.5 * lr * (1 + math.cos(math.pi * step / total))


def optimizer_step(args, model, optimizer, scaler, pending):
    if pending != args.accumulation_steps:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(args.accumulation_steps / pending)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


def train_epoch(args, epoch, model, loader, optimizer, amp_ctx, scaler):
    pending = 0
    total = args.epochs * len(loader)
    for step, (ids, labels, loss_mask) in enumerate(loader):
        ids, labels, loss_mask = ids.to(args.device), labels.to(args.device), loss_mask.to(args.device)
        for group in optimizer.param_groups:
            group["lr"] = get_lr(epoch * len(loader) + step, total, args.lr)
        with amp_ctx():
            logits = model(ids)
            token_loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        loss = (token_loss * loss_mask.flatten()).sum() / loss_mask.sum()
        scaler.scale(loss / args.accumulation_steps).backward()
        pending += 1
        if pending == args.accumulation_steps:
            optimizer_step(args, model, optimizer, scaler, pending)
            pending = 0
        if step % args.log_interval == 0:
            print(f"epoch {epoch} step {step}/{len(loader)} loss {loss.item():.3f}")
    if pending:
        optimizer_step(args, model, optimizer, scaler, pending)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--device", default="cuda:0")
    p.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    p.add_argument("--epochs", type=int, default=1)
    p.add_argument("--lr", type=float, default=5e-4)
    p.add_argument("--batch_size", type=int, default=32)
    p.add_argument("--accumulation_steps", type=int, default=8)
    p.add_argument("--grad_clip", type=float, default=1.0)
    p.add_argument("--log_interval", type=int, default=100)
    args = p.parse_args()
    amp_ctx, scaler = precision(args.device, args.dtype)
    model = MiniLM().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = torch.utils.data.DataLoader(PretrainRows("pretrain.jsonl"), args.batch_size, shuffle=True)
    for epoch in range(args.epochs):
        train_epoch(args, epoch, model, loader, optimizer, amp_ctx, scaler)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        torch.save({**state, "epoch": epoch}, "pretrain.pth")


if __name__ == "__main__":
    main()
