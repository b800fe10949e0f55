import torch
from accelerate import Accelerator


def evaluate(model, loader, accelerator: Accelerator):
    model.eval()
    total = []
    with torch.no_grad():
        for batch in loader:
            with accelerator.autocast():
                out = model(batch["x"])
            total.append(accelerator.gather(out.float().mean()))
    return torch.stack(total).mean().item()


def train(model, optimizer, loader, accelerator: Accelerator):
    for batch in loader:
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = model(batch["x"]).pow(2).mean()
        accelerator.backward(loss)
        if accelerator.optimizer_step_was_skipped:
            print("skipped")
        optimizer.step()
