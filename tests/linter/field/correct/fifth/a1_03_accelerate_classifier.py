# why correct: clipping goes through accelerator.clip_grad_norm_, which unscales, and neither the loss division nor step/zero_grad need a guard inside accumulate()
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_constant_schedule_with_warmup


def loaders(rows, tok, bs):
    def collate(batch):
        enc = tok([r["text"] for r in batch], truncation=True, max_length=256, padding=True, return_tensors="pt")
        enc["labels"] = torch.tensor([r["label"] for r in batch])
        return enc

    return [DataLoader(part, bs, shuffle=i == 0, collate_fn=collate) for i, part in enumerate(rows)]


def train(rows, name="distilroberta-base", epochs=3, bs=16, accumulate=4):
    accelerator = Accelerator(
        mixed_precision="fp16",
        gradient_accumulation_steps=accumulate,
        project_config=ProjectConfiguration("sentiment", automatic_checkpoint_naming=True, total_limit=3),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    tok = AutoTokenizer.from_pretrained(name)
    train_dl, dev_dl = loaders(rows, tok, bs)
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    sched = get_constant_schedule_with_warmup(optimizer, 100)
    model, optimizer, train_dl, dev_dl, sched = accelerator.prepare(model, optimizer, train_dl, dev_dl, sched)

    for epoch in range(epochs):
        model.train()
        for batch in train_dl:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                sched.step()
                optimizer.zero_grad()

        model.eval()
        hit = total = 0
        for batch in dev_dl:
            with torch.no_grad():
                guess = model(**batch).logits.argmax(-1)
            guess, gold = accelerator.gather_for_metrics((guess, batch["labels"]))
            hit += (guess == gold).sum().item()
            total += gold.numel()
        accelerator.print(f"epoch {epoch}: {hit / total:.4f}")
        accelerator.save_state()
    return accelerator.unwrap_model(model)
