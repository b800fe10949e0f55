# source: https://github.com/areal-project/AReaL/issues/1292
# mistake: the whole model is stored in bfloat16 and plain AdamW updates it at lr 1e-5, so most updates round away and the moments are bfloat16 too
# severity: warning
import json
import math
import os

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

HYPER = dict(lr=1e-5, weight_decay=0.1, warmup=50, updates=2000, accum=16, clip=1.0)


def rows(path, tok, limit=4096):
    with open(path) as fh:
        for line in fh:
            ex = json.loads(line)
            prompt = tok(ex["prompt"], add_special_tokens=False)["input_ids"]
            answer = tok(ex["answer"] + tok.eos_token, add_special_tokens=False)["input_ids"]
            ids = (prompt + answer)[:limit]
            labels = ([-100] * len(prompt) + answer)[:limit]
            yield torch.tensor([ids]), torch.tensor([labels])


def windows(path, tok, n):
    while True:
        window = []
        for item in rows(path, tok):
            window.append(item)
            if len(window) == n:
                yield window
                window = []


def cosine(step):
    if step < HYPER["warmup"]:
        return (step + 1) / HYPER["warmup"]
    done = (step - HYPER["warmup"]) / (HYPER["updates"] - HYPER["warmup"])
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def finetune(name, data, out):
    tok = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name)
    model = model.to(device="cuda", dtype=torch.bfloat16)  # <- here
    model.gradient_checkpointing_enable()
    model.train()

    optimizer = torch.optim.AdamW(  # <- here
        model.parameters(), lr=HYPER["lr"], betas=(0.9, 0.95), weight_decay=HYPER["weight_decay"])  # <- here
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)

    stream = windows(data, tok, HYPER["accum"])
    for step in range(HYPER["updates"]):
        window = next(stream)
        tokens = sum((lab[:, 1:] != -100).sum().item() for _, lab in window)
        total = 0.0
        for ids, labels in window:
            ids, labels = ids.cuda(), labels.cuda()
            logits = model(ids).logits[:, :-1].float()
            nll = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
            loss = nll / max(1, tokens)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), HYPER["clip"])
        optimizer.step()  # <- here
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"{step} {total:.4f} {schedule.get_last_lr()[0]:.2e}")

    os.makedirs(out, exist_ok=True)
    model.save_pretrained(out)
    tok.save_pretrained(out)


if __name__ == "__main__":
    finetune("Qwen/Qwen3-8B", "sft.jsonl", "out/sft")
