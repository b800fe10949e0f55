import torch


def train(model, optimizer, criterion, data):
    model.train()
    for batch_idx, (x, y) in enumerate(data):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
            loss = criterion(output, y)
        loss.backward()
        optimizer.step()
        if batch_idx % 100 == 0:
            print(batch_idx, loss.item())
