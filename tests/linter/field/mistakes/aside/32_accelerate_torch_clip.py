# source: https://github.com/huggingface/trl/pull/595
# mistake: with fp16 Accelerate the gradients are clipped by torch.nn.utils instead of accelerator.clip_grad_norm_, that is while they are still scaled.
# severity: error
# torch: any
import argparse

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


def collate(tokenizer, rows):
    enc = tokenizer([r["text"] for r in rows], truncation=True, max_length=512, padding=True, return_tensors="pt")
    enc["labels"] = enc["input_ids"].masked_fill(enc["attention_mask"] == 0, -100)
    return enc


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name", default="gpt2")
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=1.41e-5)
    args = parser.parse_args()

    accelerator = Accelerator(mixed_precision="fp16")
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model_name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = load_dataset("imdb", split="train")
    loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=lambda rows: collate(tokenizer, rows))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = model(**batch).loss
        accelerator.backward(loss)
        if args.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)  # <- here
        optimizer.step()
        if step % 50 == 0:
            accelerator.print(step, loss.item())


if __name__ == "__main__":
    main()
