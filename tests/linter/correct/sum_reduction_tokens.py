import torch
import torch.nn.functional as F


def train(model, loader, optimizer, accum):
    for i, batch in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(batch["x"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum")
        (loss / batch["tokens"]).backward()
        if (i + 1) % accum == 0:
            optimizer.step()
            optimizer.zero_grad()
