# why correct: a wrapper around GradScaler does scaling, unscaling, clipping and stepping in the right order, and its state goes into the checkpoint and back
import contextlib
import os

import torch
from torch import nn


class LossStepper:
    """Callable that does everything between a loss value and an updated model."""

    def __init__(self, optimizer, precision="fp16", clip=None, accumulate=1):
        self.optimizer, self.clip, self.accumulate = optimizer, clip, accumulate
        self.dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        self.scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
        self.calls = 0

    def context(self):
        return torch.autocast("cuda", dtype=self.dtype) if self.dtype else contextlib.nullcontext()

    def parameters(self):
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def __call__(self, loss):
        self.scaler.scale(loss / self.accumulate).backward()
        self.calls += 1
        if self.calls % self.accumulate:
            return None
        norm = None
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def state_dict(self):
        return {"scaler": self.scaler.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.scaler.load_state_dict(state["scaler"])
        self.optimizer.load_state_dict(state["optimizer"])


class TCN(nn.Module):
    def __init__(self, channels, width=128, levels=6):
        super().__init__()
        rows = [nn.Conv1d(channels, width, 1)]
        for i in range(levels):
            rows += [nn.ReLU(), nn.Conv1d(width, width, 3, padding=2 ** i, dilation=2 ** i), nn.BatchNorm1d(width)]
        self.net = nn.Sequential(*rows)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.net(x).mean(-1)).squeeze(-1)


def train(loader, channels, folder, epochs=30, precision="fp16"):
    model = TCN(channels).cuda()
    stepper = LossStepper(torch.optim.AdamW(model.parameters(), 1e-3), precision, clip=1.0)
    os.makedirs(folder, exist_ok=True)
    start, path = 0, os.path.join(folder, "state.pt")
    if os.path.exists(path):
        state = torch.load(path, map_location="cuda")
        model.load_state_dict(state["model"])
        stepper.load_state_dict(state["stepper"])
        start = state["epoch"]

    for epoch in range(start, epochs):
        for window, remaining_life in loader:
            with stepper.context():
                guess = model(window.cuda())
                loss = nn.functional.huber_loss(guess, remaining_life.cuda())
            stepper(loss)
        torch.save({"model": model.state_dict(), "stepper": stepper.state_dict(), "epoch": epoch + 1}, path)
    return model
