# why correct: neither branch of the stepper clears gradients, since the loop clears them for both before every backward pass
from enum import Enum
from typing import Callable

import torch
from torch import nn


class Mode(Enum):
    FULL = "fp32"
    HALF = "fp16"
    BRAIN = "bf16"

    @property
    def dtype(self):
        return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.value, torch.float32)


def drop_grads(module: nn.Module):
    for p in module.parameters():
        p.grad = None


def make_backward(mode: Mode, scaler) -> Callable:
    if mode is Mode.HALF:
        return lambda loss: scaler.scale(loss).backward()
    return lambda loss: loss.backward()


def make_stepper(mode: Mode, model, optimizer, scaler, clip) -> Callable:
    def half():
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip, error_if_nonfinite=False)
        scaler.step(optimizer)
        scaler.update()

    def plain():
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return half if mode is Mode.HALF else plain


class SessionRecommender(nn.Module):
    def __init__(self, items, dim=128):
        super().__init__()
        self.items = nn.Embedding(items + 1, dim, padding_idx=0)
        self.gru = nn.GRU(dim, dim, 2, batch_first=True, dropout=0.1)
        self.bias = nn.Parameter(torch.zeros(items + 1))

    def forward(self, seq):
        h, _ = self.gru(self.items(seq))
        return h @ self.items.weight.T + self.bias


def next_item_loss(model, seq, mode):
    with torch.autocast("cuda", dtype=mode.dtype, enabled=mode is not Mode.FULL):
        scores = model(seq[:, :-1])
    return nn.functional.cross_entropy(scores.float().flatten(0, 1), seq[:, 1:].flatten(), ignore_index=0)


def fit(model, loader, mode: Mode, epochs=10, lr=1e-3, clip=5.0):
    model.cuda().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cuda") if mode is Mode.HALF else None
    backward = make_backward(mode, scaler)
    step = make_stepper(mode, model, optimizer, scaler, clip)
    for epoch in range(epochs):
        total = torch.zeros((), device="cuda")
        for n, seq in enumerate(loader, 1):
            drop_grads(model)
            loss = next_item_loss(model, seq.cuda(non_blocking=True), mode)
            backward(loss)
            step()
            total += loss.detach()
        print(f"{mode.value} epoch {epoch} loss {total.item() / n:.4f}")


if __name__ == "__main__":
    import sys

    from clicks import ITEMS, sessions

    fit(SessionRecommender(ITEMS), sessions(batch=256), Mode(sys.argv[1]))
