import torch
import torch.nn.functional as F


def train(model, loader, optimizer, accum):
    scaler = torch.amp.GradScaler("cuda")
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if (i + 1) % accum == 0:
            scaler.unscale_(optimizer)
            for p in model.parameters():
                p.grad.div_(accum)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
