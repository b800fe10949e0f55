# source: a trainer with two backends, re-expressed: the scaler is used where Accelerate is not
import torch
from accelerate import Accelerator


def fit(model, batches, optimizer, managed):
    accelerator = Accelerator(mixed_precision="fp16") if managed else None
    scaler = torch.amp.GradScaler("cuda")
    if managed:
        model, optimizer = accelerator.prepare(model, optimizer)
    for batch in batches:
        optimizer.zero_grad()
        if managed:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
        else:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(batch).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
