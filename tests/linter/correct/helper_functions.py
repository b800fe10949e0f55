import torch
from torch.nn.utils import clip_grad_norm_


def forward_loss(model, batch, criterion):
    with torch.autocast("cuda", dtype=torch.float16):
        return criterion(model(batch["x"]), batch["y"])


def backward(scaler, loss):
    scaler.scale(loss).backward()


def apply_step(scaler, optimizer, model, max_norm):
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


def train(model, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for batch in loader:
        loss = forward_loss(model, batch, criterion)
        backward(scaler, loss)
        apply_step(scaler, optimizer, model, 1.0)
