import torch


def fit(model, loader, optimizer, criterion, scaler=None, clip=None, accumulate=1):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16, enabled=scaler is not None):
            loss = criterion(model(x), y) / accumulate
        if scaler:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        if (i + 1) % accumulate != 0:
            continue
        if clip:
            if scaler:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
