import torch
from transformers import AutoModelForMaskedLM, get_linear_schedule_with_warmup

model = AutoModelForMaskedLM.from_pretrained("roberta-base").to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
scheduler = get_linear_schedule_with_warmup(optimizer, 100, 1000)
scaler = torch.amp.GradScaler("cuda")


def train(loader, max_norm):
    for batch in loader:
        with torch.amp.autocast("cuda"):
            outputs = model(**batch)
            loss = outputs.loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        previous = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= previous:
            scheduler.step()
        optimizer.zero_grad()
