import torch


def train(model, loader, criterion, scale=1024.0):
    model.half()
    masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    for x, y in loader:
        model.zero_grad()
        loss = criterion(model(x.half()).float(), y)
        (loss * scale).backward()
        for master, p in zip(masters, model.parameters()):
            master.grad = p.grad.float() / scale
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters()):
                p.copy_(master)
