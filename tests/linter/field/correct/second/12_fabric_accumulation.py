"""
# style of: Lightning-AI/litgpt:litgpt/pretrain.py
# correct: fabric.backward scales, fabric.clip_gradients unscales by itself before it clips, and the prepared optimizer's step goes through Fabric's scaler.
# torch: 2.1+
"""
import math
import time

import lightning as L
import torch
import torch.nn.functional as F

from tiny_llm import LLM, Config, token_loader


def get_lr(learning_rate, it, warmup_iters, max_iters, min_lr):
    if it < warmup_iters:
        return learning_rate * it / warmup_iters
    ratio = min(1.0, (it - warmup_iters) / (max_iters - warmup_iters))
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def setup(precision="16-mixed", devices=2, **kwargs):
    fabric = L.Fabric(accelerator="cuda", devices=devices, strategy="ddp", precision=precision)
    fabric.launch()
    main(fabric, **kwargs)


def main(fabric, max_iters=20_000, accumulate=8, lr=4e-4, max_norm=1.0, resume=None, out="out/lit.ckpt"):
    fabric.seed_everything(42)
    with fabric.init_module(empty_init=False):
        model = LLM(Config())
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, betas=(0.9, 0.95))
    optimizer = fabric.setup_optimizers(optimizer)
    loader = fabric.setup_dataloaders(token_loader("train"))

    state = {"model": model, "optimizer": optimizer, "iter_num": 0, "step_count": 0}
    if resume:
        fabric.load(resume, state)

    model.train()
    tick = time.perf_counter()
    for batch in loader:
        if state["iter_num"] >= max_iters:
            break
        for group in optimizer.param_groups:
            group["lr"] = get_lr(lr, state["iter_num"], 500, max_iters, 4e-5)
        state["iter_num"] += 1
        is_accumulating = state["iter_num"] % accumulate != 0
        ids, targets = batch[:, :-1].contiguous().long(), batch[:, 1:].contiguous().long()

        with fabric.no_backward_sync(model, enabled=is_accumulating):
            logits = model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            fabric.backward(loss / accumulate)

        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=max_norm)
            optimizer.step()
            optimizer.zero_grad()
            state["step_count"] += 1
            if state["step_count"] % 50 == 0:
                fabric.print(f"step {state['step_count']} loss {loss.item():.3f} {time.perf_counter() - tick:.1f}s")
        if state["iter_num"] % 2000 == 0:
            fabric.save(out, state)


if __name__ == "__main__":
    setup()
