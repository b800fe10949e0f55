# source: https://github.com/Lightning-AI/litgpt/issues/2042
# mistake: fabric.clip_gradients is used with 16-mixed precision and a fused AdamW, which does its own unscaling, so clipping raises NotImplementedError.
# severity: error
# torch: any
import math
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

from tinygpt import GPT, Config, PackedTokens


def get_lr(it: int, warmup: int, total: int, peak: float) -> float:
    if it < warmup:
        return peak * (it + 1) / warmup
    ratio = (it - warmup) / max(1, total - warmup)
    return 0.1 * peak + 0.45 * peak * (1 + math.cos(math.pi * min(1.0, ratio)))


def train(fabric, model, optimizer, loader, max_iters=1000, accumulate=8, grad_clip=1.0):
    model.train()
    for it, (inputs, targets) in enumerate(loader, start=1):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it, 100, max_iters, 4e-4)
        accumulating = it % accumulate != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            logits = model(inputs)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            fabric.backward(loss / accumulate)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=grad_clip)  # <- here
            optimizer.step()
            optimizer.zero_grad()
        if it % 50 == 0:
            fabric.print(f"iter {it}: loss {loss.item():.4f}")
        if it >= max_iters:
            break


def main(data_dir: Path = Path("data/slim"), devices: int = 2):
    fabric = L.Fabric(devices=devices, strategy="ddp", precision="16-mixed")
    fabric.launch()
    with fabric.init_module():
        model = GPT(Config.from_name("pico"))
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.1, fused=True)  # <- here
    optimizer = fabric.setup_optimizers(optimizer)
    loader = fabric.setup_dataloaders(DataLoader(PackedTokens(data_dir), batch_size=8))
    train(fabric, model, optimizer, loader)


if __name__ == "__main__":
    main()
