import torch


def train(model, chunks, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda")
    hidden = None
    for x, y in chunks:
        if hidden is not None:
            hidden = hidden.detach()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            output, hidden = model(x, hidden)
            loss = criterion(output, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        scaler.step(optimizer)
        scaler.update()
