import torch
import torch.nn as nn


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    criterion = nn.BCELoss()
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            p = torch.sigmoid(model(x))
        loss = criterion(p.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
