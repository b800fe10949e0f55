import copy

import torch
import wandb
from tqdm import tqdm


def train(model, loader, optimizer, criterion, epochs):
    ema = copy.deepcopy(model).eval()
    scaler = torch.amp.GradScaler("cuda")
    running = torch.zeros((), device="cuda")
    for epoch in range(epochs):
        bar = tqdm(loader, desc=f"epoch {epoch}")
        for step, (x, y) in enumerate(bar):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            running.lerp_(loss.detach(), 0.01)
            if step % 50 == 0:
                bar.set_postfix(loss=running.item())
                wandb.log({"loss": running.item(), "scale": scaler.get_scale()})
            with torch.no_grad():
                for p, q in zip(ema.parameters(), model.parameters()):
                    p.lerp_(q, 0.001)
