import torch
from torch.profiler import profile, schedule


def train(model, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda")
    with profile(schedule=schedule(wait=1, warmup=1, active=3)) as prof:
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16), torch.profiler.record_function("forward"):
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            prof.step()
