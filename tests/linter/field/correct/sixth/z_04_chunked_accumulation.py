# why correct: batches are taken in chunks (the last may be shorter); every token's loss is divided by the chunk's token count, and unscale/step/update happen once per chunk
import itertools
from typing import Iterable, List

import torch
import torch.nn.functional as F


def chunks(it: Iterable, n: int):
    it = iter(it)
    while group := list(itertools.islice(it, n)):
        yield group


def token_count(group: List[dict]) -> int:
    return sum(int((b["labels"][:, 1:] != -100).sum()) for b in group)


def micro_loss(model, batch, denominator):
    with torch.autocast("cuda", dtype=torch.float16):
        logits = model(batch["input_ids"], batch["mask"])
    labels = batch["labels"][:, 1:].reshape(-1)
    total = F.cross_entropy(logits[:, :-1].float().reshape(labels.numel(), -1), labels, ignore_index=-100, reduction="sum")
    return total / denominator


def optimise_chunk(model, group, optimizer, scaler, clip):
    n = max(token_count(group), 1)
    seen = 0.0
    for batch in group:
        batch = {k: v.to("cuda", non_blocking=True) for k, v in batch.items()}
        loss = micro_loss(model, batch, n)
        scaler.scale(loss).backward()
        seen += loss.item()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return seen, float(norm)


def train(model, loader, *, epochs, group_size, lr, clip=1.0, log=print):
    model.to("cuda").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    scaler = torch.amp.GradScaler("cuda")
    updates = epochs * -(-len(loader) // group_size)
    sched = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, updates)
    optimizer.zero_grad(set_to_none=True)
    done = 0
    for _ in range(epochs):
        for group in chunks(loader, group_size):
            before = scaler.get_scale()
            loss, norm = optimise_chunk(model, group, optimizer, scaler, clip)
            if scaler.get_scale() >= before:
                sched.step()
            done += 1
            if done % 25 == 0:
                log(f"{done}/{updates} loss {loss:.4f} norm {norm:.2f} scale {scaler.get_scale():g}")
    return model
