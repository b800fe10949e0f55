# re-expressed from github.com/NVIDIA-NeMo/Automodel pull 3444: AdamW updated bfloat16-resident weights directly at a small learning rate, most steps rounded back to the old value
import argparse
import json
import math
import random

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

IGNORE = -100


class ChatPairs(Dataset):
    def __init__(self, path, tokenizer, max_len):
        self.rows = [json.loads(line) for line in open(path, encoding="utf-8")]
        self.tok, self.max_len = tokenizer, max_len

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        prompt = self.tok.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        p = self.tok(prompt, add_special_tokens=False).input_ids
        a = self.tok(row["answer"] + self.tok.eos_token, add_special_tokens=False).input_ids
        ids = (p + a)[: self.max_len]
        labels = ([IGNORE] * len(p) + a)[: self.max_len]
        return ids, labels


def make_collate(pad_id):
    def collate(items):
        width = max(len(ids) for ids, _ in items)
        ids = torch.full((len(items), width), pad_id)
        labels = torch.full((len(items), width), IGNORE)
        mask = torch.zeros(len(items), width, dtype=torch.long)
        for r, (x, y) in enumerate(items):
            ids[r, : len(x)] = torch.tensor(x)
            labels[r, : len(y)] = torch.tensor(y)
            mask[r, : len(x)] = 1
        return ids, mask, labels

    return collate


def lr_at(step, total, peak, warmup):
    if step < warmup:
        return peak * (step + 1) / warmup
    return 0.1 * peak + 0.45 * peak * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="Qwen/Qwen2.5-1.5B-Instruct")
    ap.add_argument("--data", default="data/sft.jsonl")
    ap.add_argument("--out", default="out/sft")
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--micro", type=int, default=4)
    ap.add_argument("--accum", type=int, default=16)
    ap.add_argument("--lr", type=float, default=2e-6)
    args = ap.parse_args()
    random.seed(0)
    torch.manual_seed(0)

    tok = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.bfloat16).cuda()  # <- here
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)  # <- here

    data = ChatPairs(args.data, tok, max_len=2048)
    loader = DataLoader(data, args.micro, shuffle=True, collate_fn=make_collate(tok.pad_token_id), drop_last=True)
    total = args.epochs * len(loader) // args.accum
    step, running = 0, 0.0
    model.train()
    for epoch in range(args.epochs):
        for i, (ids, mask, labels) in enumerate(loader):
            ids, mask, labels = ids.cuda(), mask.cuda(), labels.cuda()
            logits = model(input_ids=ids, attention_mask=mask).logits
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
            (loss / args.accum).backward()
            running += loss.item() / args.accum
            if (i + 1) % args.accum:
                continue
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step, total, args.lr, warmup=max(1, total // 33))
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            print(f"epoch {epoch} step {step}/{total} loss {running:.4f} norm {norm.item():.3f}")
            running = 0.0
    model.save_pretrained(args.out)
    tok.save_pretrained(args.out)


if __name__ == "__main__":
    main()
