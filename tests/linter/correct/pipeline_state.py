import torch


class State:
    def __init__(self, model, optimizer, scaler, scheduler):
        self.model, self.optimizer = model, optimizer
        self.scaler, self.scheduler = scaler, scheduler

    def state_dict(self):
        return {
            name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scaler", "scheduler")
        }


def step(state, loss):
    state.scaler.scale(loss).backward()
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad()


def train(state, loader, criterion):
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(state.model(x), y)
        step(state, loss)
    torch.save(state.state_dict(), "last.pt")
