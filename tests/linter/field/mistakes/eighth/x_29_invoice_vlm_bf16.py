# source: NVIDIA-NeMo/Automodel PR #3444
# mistake: the weights themselves are bfloat16 and updated in place with a learning rate of 6e-6, most updates are smaller than half a unit in the last place and are lost
# severity: warning
import json
import pathlib

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForImageTextToText, AutoProcessor

BASE = "Qwen/Qwen2-VL-2B-Instruct"
LR = 6e-6
EPOCHS = 2


class Invoices(Dataset):
    def __init__(self, folder):
        self.items = sorted(pathlib.Path(folder).glob("*.json"))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        meta = json.loads(self.items[i].read_text())
        return Image.open(self.items[i].with_suffix(".jpg")).convert("RGB"), json.dumps(meta["fields"])


processor = AutoProcessor.from_pretrained(BASE)


def collate(rows):
    chats = []
    for _, answer in rows:
        turn = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Extract the fields."}]},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        chats.append(processor.apply_chat_template(turn))
    enc = processor(images=[r[0] for r in rows], text=chats, padding=True, return_tensors="pt")
    enc["labels"] = enc["input_ids"].masked_fill(enc["attention_mask"] == 0, -100)
    return enc


model = AutoModelForImageTextToText.from_pretrained(BASE, torch_dtype=torch.bfloat16)  # <- here
model.to("cuda").train()
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)  # <- here

loader = DataLoader(Invoices("invoices/train"), batch_size=2, shuffle=True, collate_fn=collate, drop_last=True)
ACCUM = 8
total = len(loader) // ACCUM * EPOCHS
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=max(total, 1))

update = 0
for epoch in range(EPOCHS):
    window = []
    optimizer.zero_grad(set_to_none=True)
    for i, batch in enumerate(loader):
        if i >= len(loader) // ACCUM * ACCUM:
            break
        batch = {k: v.to("cuda") for k, v in batch.items()}
        batch["pixel_values"] = batch["pixel_values"].to(torch.bfloat16)
        loss = model(**batch).loss
        (loss / ACCUM).backward()
        window.append(loss.item())
        if (i + 1) % ACCUM == 0:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()  # <- here
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            update += 1
            print(f"update {update}/{total} loss {sum(window) / len(window):.4f} norm {norm.item():.2f}")
            window.clear()

model.save_pretrained("invoice-vlm")
processor.save_pretrained("invoice-vlm")
