# why correct: Adam uses the scaler for its fp16 phase; L-BFGS, which needs a closure, runs afterwards in plain float32 without it
import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class HeatField(nn.Module):
    def __init__(self, width=256, depth=5):
        super().__init__()
        dims = [3] + [width] * depth + [1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims, dims[1:]))

    def forward(self, p):
        for layer in self.layers[:-1]:
            p = torch.tanh(layer(p))
        return self.layers[-1](p)


def fit_loss(field, points, temperature, amp):
    with autocast(enabled=amp):
        pred = field(points).squeeze(-1)
    return (pred.float() - temperature).square().mean()


def adam_phase(field, optimizer, scaler, loader, epochs):
    for epoch in range(epochs):
        for points, temperature in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = fit_loss(field, points.cuda(), temperature.cuda(), amp=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        print(f"adam {epoch}: {loss.item():.3e}")


def lbfgs_phase(field, points, temperature, rounds):
    optimizer = torch.optim.LBFGS(field.parameters(), max_iter=50, history_size=20, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = fit_loss(field, points, temperature, amp=False)
        loss.backward()
        return loss

    for r in range(rounds):
        loss = optimizer.step(closure)
        print(f"lbfgs {r}: {loss.item():.3e}")


def main(loader, refine_set):
    field = HeatField().cuda()
    optimizer = torch.optim.Adam(field.parameters(), lr=1e-3)
    scaler = GradScaler()
    adam_phase(field, optimizer, scaler, loader, epochs=50)
    points, temperature = (t.cuda() for t in refine_set)
    lbfgs_phase(field, points, temperature, rounds=20)
    torch.save(field.state_dict(), "field.pt")
