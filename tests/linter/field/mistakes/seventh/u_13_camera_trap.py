# source: https://github.com/conservationtechlab/animl-py/issues/298
# mistake: a new GradScaler is made for every epoch, so the adapted loss scale is thrown away each time
# severity: warning
from typing import Callable, Optional

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm


def _train_helper(
    loader: DataLoader,
    model: nn.Module,
    loss_fn: Callable,
    optimizer: torch.optim.Optimizer,
    device: str = "cuda",
    mixed_precision: bool = False,
):
    model.train()
    scaler = torch.amp.GradScaler(device) if mixed_precision else None  # <- here
    total, correct, seen = 0.0, 0, 0
    bar = tqdm(loader)
    for images, labels, _ in bar:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        if scaler is not None:
            with torch.autocast(device, dtype=torch.float16):
                out = model(images)
                loss = loss_fn(out, labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            out = model(images)
            loss = loss_fn(out, labels)
            loss.backward()
            optimizer.step()
        total += loss.item() * labels.size(0)
        correct += (out.argmax(1) == labels).sum().item()
        seen += labels.size(0)
        bar.set_description(f"loss {total / seen:.3f} acc {100 * correct / seen:.1f}%")
    return total / seen, correct / seen


@torch.no_grad()
def _validate(loader, model, loss_fn, device):
    model.eval()
    total, seen = 0.0, 0
    for images, labels, _ in loader:
        out = model(images.to(device))
        total += loss_fn(out, labels.to(device)).item() * labels.size(0)
        seen += labels.size(0)
    return total / seen


def train_classifier(
    model: nn.Module,
    train_loader: DataLoader,
    val_loader: DataLoader,
    epochs: int = 50,
    lr: float = 1e-4,
    patience: Optional[int] = 5,
    mixed_precision: bool = True,
):
    device = "cuda"
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-4)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    best, stale = float("inf"), 0
    for epoch in range(epochs):
        _train_helper(train_loader, model, loss_fn, optimizer, device, mixed_precision)  # <- here
        val = _validate(val_loader, model, loss_fn, device)
        if val < best:
            best, stale = val, 0
            torch.save(model.state_dict(), "best_species.pt")
        else:
            stale += 1
            if patience is not None and stale >= patience:
                break
