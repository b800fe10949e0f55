import torch


def train(pairs, loader, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        for model, optimizer in pairs:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
