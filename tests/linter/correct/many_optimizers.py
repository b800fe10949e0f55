import torch


def train(models, optimizers, loader, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            losses = [criterion(m(x), y) for m in models]
        for loss in losses:
            scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        for m in models:
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
