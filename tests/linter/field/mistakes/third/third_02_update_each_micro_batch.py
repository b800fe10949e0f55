import argparse

import torch
from datasets import load_dataset
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
)


def get_loaders(tokenizer, batch_size):
    raw = load_dataset("glue", "mrpc")

    def tok(batch):
        return tokenizer(batch["sentence1"], batch["sentence2"], truncation=True, max_length=128)

    ds = raw.map(tok, batched=True, remove_columns=["sentence1", "sentence2", "idx"])
    ds = ds.rename_column("label", "labels")
    collate = DataCollatorWithPadding(tokenizer)
    return (
        DataLoader(ds["train"], batch_size, shuffle=True, collate_fn=collate, drop_last=True),
        DataLoader(ds["validation"], batch_size, collate_fn=collate),
    )


def evaluate(model, loader, device):
    model.eval()
    hits = total = 0
    with torch.no_grad():
        for batch in loader:
            batch = {k: v.to(device) for k, v in batch.items()}
            with torch.autocast("cuda", dtype=torch.float16):
                logits = model(**batch).logits
            hits += (logits.argmax(-1) == batch["labels"]).sum().item()
            total += batch["labels"].numel()
    return hits / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="roberta-base")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--accum", type=int, default=4)
    args = parser.parse_args()
    device = torch.device("cuda")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train_loader, val_loader = get_loaders(tokenizer, args.batch_size)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2).to(device)
    optimizer = AdamW(model.parameters(), lr=2e-5, weight_decay=0.01)
    total_steps = args.epochs * (len(train_loader) // args.accum)
    scheduler = get_linear_schedule_with_warmup(optimizer, int(0.06 * total_steps), total_steps)
    scaler = torch.amp.GradScaler("cuda")

    for epoch in range(args.epochs):
        model.train()
        optimizer.zero_grad(set_to_none=True)
        for step, batch in enumerate(train_loader):
            batch = {k: v.to(device) for k, v in batch.items()}
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(**batch).loss / args.accum
            scaler.scale(loss).backward()
            if (step + 1) % args.accum == 0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
            scaler.update()  # <- here
        optimizer.zero_grad(set_to_none=True)
        print(f"epoch {epoch} acc {evaluate(model, val_loader, device):.4f}")


if __name__ == "__main__":
    main()
