# source: meta-pytorch/torchtune#2254
# mistake: the whole model is held in bfloat16 and stepped by plain AdamW with a tiny learning rate; updates below bfloat16's spacing are rounded away
# severity: warning
import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup


def collate(tok, max_len):
    def fn(rows):
        enc = tok([r["prompt"] + r["answer"] + tok.eos_token for r in rows], truncation=True,
                  max_length=max_len, padding=True, return_tensors="pt")
        labels = enc["input_ids"].clone()
        labels[enc["attention_mask"] == 0] = -100
        for i, r in enumerate(rows):
            labels[i, :len(tok(r["prompt"])["input_ids"])] = -100
        enc["labels"] = labels
        return enc
    return fn


def token_loss(logits, labels):
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def main(rows):
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="meta-llama/Llama-3.2-1B")
    p.add_argument("--lr", type=float, default=6e-7)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--max-len", type=int, default=2048)
    args = p.parse_args()

    tok = AutoTokenizer.from_pretrained(args.model)
    tok.pad_token = tok.eos_token
    tok.padding_side = "right"
    model = AutoModelForCausalLM.from_pretrained(args.model)
    model = model.to("cuda", dtype=torch.bfloat16)  # <- here
    model.gradient_checkpointing_enable()
    model.config.use_cache = False

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)  # <- here
    loader = DataLoader(rows, batch_size=args.batch, shuffle=True, collate_fn=collate(tok, args.max_len))
    total = args.epochs * len(loader)
    sched = get_cosine_schedule_with_warmup(optimizer, total // 20, total)

    model.train()
    step = 0
    for _ in range(args.epochs):
        for batch in loader:
            batch = {k: v.cuda() for k, v in batch.items()}
            out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            loss = token_loss(out.logits, batch["labels"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()  # <- here
            sched.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 20 == 0:
                print(step, loss.item(), sched.get_last_lr()[0])
    model.save_pretrained("sft-out")
    tok.save_pretrained("sft-out")


if __name__ == "__main__":
    from datasets import load_dataset

    main(load_dataset("json", data_files="sft.jsonl", split="train"))
