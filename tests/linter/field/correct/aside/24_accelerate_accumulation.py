# style of: huggingface/accelerate:examples/by_feature/gradient_accumulation.py
# torch: 2.0+
import argparse

import torch
from accelerate import Accelerator
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup


def training_function(config, args, train_set, eval_set, collate_fn):
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    train_loader = DataLoader(train_set, shuffle=True, collate_fn=collate_fn, batch_size=config["batch_size"])
    eval_loader = DataLoader(eval_set, shuffle=False, collate_fn=collate_fn, batch_size=32)

    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased", num_labels=2)
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=100,
        num_training_steps=(len(train_loader) * config["num_epochs"]) // args.gradient_accumulation_steps,
    )
    model, optimizer, train_loader, eval_loader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, lr_scheduler
    )

    for epoch in range(config["num_epochs"]):
        model.train()
        for batch in train_loader:
            # handles no_sync, and the short window at the end of the loader
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients and accelerator.optimizer_step_was_skipped:
                    accelerator.print("overflow: the optimizer step was skipped")

        model.eval()
        hits, seen = 0, 0
        for batch in eval_loader:
            with torch.no_grad():
                logits = model(**batch).logits
            preds, refs = accelerator.gather_for_metrics((logits.argmax(dim=-1), batch["labels"]))
            hits += (preds == refs).sum().item()
            seen += refs.numel()
        accelerator.print(f"epoch {epoch}: {hits / seen:.4f}")
        # saves the scaler next to the model, the optimizer and the scheduler
        accelerator.save_state(f"{args.output_dir}/epoch_{epoch}")
    accelerator.end_training()


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default="fp16", choices=["no", "fp16", "bf16"])
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--output_dir", default="runs")
    return parser.parse_args()
