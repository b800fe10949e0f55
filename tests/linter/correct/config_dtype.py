import torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def train(cfg, model, loader, optimizer, criterion):
    dtype = DTYPES[cfg.precision]
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if cfg.precision == "bf16":
            continue
        if scaler.get_scale() < 1:
            raise RuntimeError("the scale collapsed")
