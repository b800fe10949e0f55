# why correct: accelerator.clip_grad_norm_ unscales before clipping and is only reached on the batches on which gradients are synchronised and a step happens
import argparse
import math

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, get_linear_schedule_with_warmup


def prepare_data(tok, path, split, longest=1024, target=160):
    raw = load_dataset("json", data_files={split: path}, split=split)

    def encode(rows):
        enc = tok(rows["minutes"], truncation=True, max_length=longest)
        enc["labels"] = tok(text_target=rows["summary"], truncation=True, max_length=target)["input_ids"]
        return enc

    return raw.map(encode, batched=True, remove_columns=raw.column_names)


def main():
    ap = argparse.ArgumentParser(description="Summaries of council minutes")
    ap.add_argument("train")
    ap.add_argument("--precision", choices=["no", "fp16", "bf16"], default="fp16")
    ap.add_argument("--base", default="facebook/bart-large")
    ap.add_argument("--accum", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--resume")
    args = ap.parse_args()

    accelerator = Accelerator(mixed_precision=args.precision, gradient_accumulation_steps=args.accum)
    tok = AutoTokenizer.from_pretrained(args.base)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.base)
    with accelerator.main_process_first():
        data = prepare_data(tok, args.train, "train")
    loader = DataLoader(data, 4, shuffle=True, collate_fn=DataCollatorForSeq2Seq(tok, model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    updates = math.ceil(len(loader) / args.accum) * args.epochs * accelerator.num_processes
    schedule = accelerator.prepare(get_linear_schedule_with_warmup(optimizer, updates // 20, updates))

    if args.resume:
        accelerator.load_state(args.resume)

    for epoch in range(args.epochs):
        model.train()
        for i, batch in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if i % 200 == 0:
                accelerator.print(epoch, i, loss.item())
        accelerator.save_state(f"state-{epoch}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained("summariser")


if __name__ == "__main__":
    main()
