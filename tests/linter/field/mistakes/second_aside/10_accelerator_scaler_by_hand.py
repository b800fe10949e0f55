"""
# source: https://github.com/huggingface/accelerate/issues/357
# mistake: the prepared optimizer already runs the accelerator's scaler inside step(); calling accelerator.scaler.update() by hand afterwards raises (no inf checks recorded).
# severity: error
# torch: any (accelerate)
"""
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup


def make_loader(tokenizer, rows, batch_size):
    def collate(batch):
        enc = tokenizer([r["text"] for r in batch], truncation=True, padding=True, return_tensors="pt")
        enc["labels"] = torch.tensor([r["label"] for r in batch])
        return enc

    return DataLoader(rows, batch_size=batch_size, shuffle=True, collate_fn=collate)


def main(rows, name="bert-base-cased", epochs=3, lr=2e-5):
    accelerator = Accelerator(mixed_precision="fp16")
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loader = make_loader(tokenizer, rows, 32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    schedule = get_linear_schedule_with_warmup(optimizer, 100, epochs * len(loader))

    scaler = accelerator.scaler
    for epoch in range(epochs):
        model.train()
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scaler.update()  # <- here
            if not accelerator.optimizer_step_was_skipped:
                schedule.step()
            if step % 50 == 0:
                accelerator.print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained("out", save_function=accelerator.save)
