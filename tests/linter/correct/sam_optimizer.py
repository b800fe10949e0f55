import torch


def train(model, loader, optimizer, criterion):
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = criterion(model(x), y)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            second = criterion(model(x), y)
        second.backward()
        optimizer.second_step(zero_grad=True)
