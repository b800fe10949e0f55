# source: https://github.com/workofart/ml-by-hand/pull/85
# mistake: all weights are bfloat16 and AdamW updates them in place with a learning rate of 1e-5, far below bfloat16's resolution; most updates are rounded away (no float32 master weights).
# severity: warning
import argparse
import os
import time

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft.data import ChatSet, pad_right


def build(name):
    tok = AutoTokenizer.from_pretrained(name)
    tok.pad_token = tok.pad_token or tok.eos_token
    model = AutoModelForCausalLM.from_pretrained(name)
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    return tok, model.to(device="cuda", dtype=torch.bfloat16)  # <- here


def token_loss(model, batch):
    logits = model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits
    logits = logits[:, :-1].float()
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def move(batch):
    return {k: v.cuda(non_blocking=True) for k, v in batch.items()}


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total, count = 0.0, 0
    for batch in loader:
        batch = move(batch)
        total += token_loss(model, batch).item()
        count += (batch["labels"][:, 1:] != -100).sum().item()
    model.train()
    return total / count


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="Qwen/Qwen2.5-0.5B")
    p.add_argument("--train", required=True)
    p.add_argument("--valid", required=True)
    p.add_argument("--out", default="sft-out")
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--epochs", type=int, default=3)
    args = p.parse_args()

    tok, model = build(args.model)
    train_dl = DataLoader(ChatSet(args.train, tok), args.batch, shuffle=True, collate_fn=pad_right(tok), drop_last=True)
    valid_dl = DataLoader(ChatSet(args.valid, tok), args.batch, collate_fn=pad_right(tok))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.01)  # <- here
    total = args.epochs * len(train_dl)
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, s / 100) * max(0.0, 1 - s / total))

    model.train()
    step, tic = 0, time.time()
    for epoch in range(args.epochs):
        for batch in train_dl:
            batch = move(batch)
            tokens = (batch["labels"][:, 1:] != -100).sum()
            loss = token_loss(model, batch) / tokens
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()  # <- here
            plan.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 20 == 0:
                print(f"{step}/{total} loss {loss.item():.4f} norm {norm.item():.2f} {time.time() - tic:.0f}s")
        print(f"epoch {epoch} valid {validate(model, valid_dl):.4f}")
    os.makedirs(args.out, exist_ok=True)
    model.save_pretrained(args.out)
    tok.save_pretrained(args.out)


if __name__ == "__main__":
    main()
