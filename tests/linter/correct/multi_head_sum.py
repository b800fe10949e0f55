import torch
import torch.nn as nn

ce, mse = nn.CrossEntropyLoss(), nn.MSELoss()


def train(model, loader, optimizer, weights):
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14, growth_interval=1000)
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            cls, box = model(batch["image"])
            losses = {"cls": ce(cls, batch["label"]), "box": mse(box, batch["box"])}
            total = sum(weights[k] * v for k, v in losses.items())
        optimizer.zero_grad()
        scaler.scale(total).backward()
        scaler.step(optimizer)
        scaler.update()
