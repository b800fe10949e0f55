# why correct: unscale, clip, step and update all sit behind the same boundary test, and the last partial window is divided by its true length
import torch
from torch import nn
from torch.cuda import amp


class WindowedStepper:
    """Accumulates over `every` micro-batches; the last window of an epoch may be shorter."""

    def __init__(self, model, optimizer, scaler, every, max_norm):
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.every = every
        self.max_norm = max_norm

    def window_length(self, i, n):
        start = (i // self.every) * self.every
        return min(self.every, n - start)

    def is_boundary(self, i, n):
        return (i + 1) % self.every == 0 or i + 1 == n

    def backward(self, loss, i, n):
        self.scaler.scale(loss / self.window_length(i, n)).backward()
        if self.is_boundary(i, n):
            self.apply()

    def apply(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def train(model, loader, epochs, every=6, use_amp=True):
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scaler = amp.GradScaler(enabled=use_amp)
    stepper = WindowedStepper(model, optimizer, scaler, every, max_norm=3.0)
    criterion = nn.CrossEntropyLoss()
    n = len(loader)
    for epoch in range(epochs):
        model.train()
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for i, (x, y) in enumerate(loader):
            with amp.autocast(enabled=use_amp):
                loss = criterion(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            stepper.backward(loss, i, n)
            total += loss.item()
        print(f"epoch {epoch} loss {total / n:.4f} scale {scaler.get_scale():.0f}")
