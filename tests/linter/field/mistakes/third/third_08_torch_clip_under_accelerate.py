import argparse

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_scheduler


def build_dataset(tokenizer, block_size):
    raw = load_dataset("wikitext", "wikitext-2-raw-v1")

    def tokenize(batch):
        return tokenizer(batch["text"])

    def group(batch):
        ids = sum(batch["input_ids"], [])
        n = len(ids) // block_size * block_size
        chunks = [ids[i:i + block_size] for i in range(0, n, block_size)]
        return {"input_ids": chunks, "labels": [list(c) for c in chunks]}

    tok = raw.map(tokenize, batched=True, remove_columns=["text"])
    return tok.map(group, batched=True, remove_columns=tok["train"].column_names)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name", default="gpt2-medium")
    parser.add_argument("--block_size", type=int, default=512)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    args = parser.parse_args()

    accelerator = Accelerator(
        mixed_precision="fp16", gradient_accumulation_steps=args.gradient_accumulation_steps
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    with accelerator.main_process_first():
        data = build_dataset(tokenizer, args.block_size)
    train_loader = DataLoader(data["train"], args.batch_size, shuffle=True, collate_fn=default_data_collator)
    eval_loader = DataLoader(data["validation"], args.batch_size, collate_fn=default_data_collator)
    model = AutoModelForCausalLM.from_pretrained(args.model_name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    total = args.epochs * len(train_loader) // args.gradient_accumulation_steps
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=100, num_training_steps=total)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    for epoch in range(args.epochs):
        model.train()
        for step, batch in enumerate(train_loader):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)  # <- here
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if step % 100 == 0:
                accelerator.print(f"epoch {epoch} step {step} loss {loss.item():.4f}")

        model.eval()
        losses = []
        for batch in eval_loader:
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(args.batch_size)))
        ppl = torch.exp(torch.cat(losses).float().mean())
        accelerator.print(f"epoch {epoch} ppl {ppl.item():.2f}")
        accelerator.save_state(f"ckpt_{epoch}")


if __name__ == "__main__":
    main()
