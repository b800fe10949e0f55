import torch.nn.functional as F


def train(model, loader, optimizer, every):
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if i % every == 0:
            print(loss.item())
