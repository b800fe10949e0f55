# why correct: the wrapper's clip() unscales first and remembers it, so clipping always sees true gradients and unscale_ runs once per step
import torch
from torch import nn


class ScaledOptimizer:
    """Makes an optimizer and its GradScaler look like one object to the loop."""

    def __init__(self, optimizer, scaler):
        self.inner = optimizer
        self.scaler = scaler
        self._true_grads = False

    @property
    def parameters(self):
        return [p for g in self.inner.param_groups for p in g["params"] if p.grad is not None]

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def expose_gradients(self):
        if not self._true_grads:
            self.scaler.unscale_(self.inner)
            self._true_grads = True

    def clip(self, limit):
        self.expose_gradients()
        return nn.utils.clip_grad_norm_(self.parameters, limit)

    def step(self):
        self.scaler.step(self.inner)
        self.scaler.update()
        self._true_grads = False

    def zero_grad(self):
        self.inner.zero_grad(set_to_none=True)

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, blob):
        self.inner.load_state_dict(blob["inner"])
        self.scaler.load_state_dict(blob["scaler"])


class KeywordSpotter(nn.Module):
    def __init__(self, mels=40, words=35):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(mels, 128, 9, padding=4), nn.BatchNorm1d(128), nn.ReLU(),
            nn.Conv1d(128, 128, 9, stride=2, padding=4), nn.BatchNorm1d(128), nn.ReLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, words),
        )

    def forward(self, x):
        return self.net(x)


def spot(loader, epochs=30, device="cuda"):
    net = KeywordSpotter().to(device)
    opt = ScaledOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4),
        torch.amp.GradScaler(device),
    )
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        for mel, word in loader:
            mel, word = mel.to(device), word.to(device)
            with torch.autocast(device, dtype=torch.float16):
                loss = loss_fn(net(mel), word)
            opt.zero_grad()
            opt.backward(loss)
            norm = opt.clip(1.0)
            opt.step()
        print(epoch, loss.item(), norm.item())
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, "kws.pt")
