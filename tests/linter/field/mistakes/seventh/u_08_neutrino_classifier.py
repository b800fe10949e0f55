# source: https://github.com/graphnet-team/graphnet/issues/846
# mistake: BCELoss on sigmoid outputs is evaluated under autocast, where PyTorch refuses it with a RuntimeError
# severity: error
import torch
from torch import nn


class BinaryTask(nn.Module):
    """Last layer and loss of a track/cascade classification."""

    def __init__(self, hidden):
        super().__init__()
        self.affine = nn.Linear(hidden, 1)
        self.activation = nn.Sigmoid()
        self.loss_function = nn.BCELoss()  # <- here

    def forward(self, h):
        return self.activation(self.affine(h)).squeeze(-1)

    def compute_loss(self, prob, truth):
        return self.loss_function(prob, truth.to(prob.dtype))  # <- here


class PulseEncoder(nn.Module):
    def __init__(self, features=7, hidden=128):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())

    def forward(self, pulses, lengths):
        h = self.point(pulses)
        inside = torch.arange(h.size(1), device=h.device)[None] < lengths[:, None]
        return (h * inside.unsqueeze(-1)).sum(1) / lengths.clamp(min=1).unsqueeze(-1)


class EventModel(nn.Module):
    def __init__(self, hidden=128):
        super().__init__()
        self.encoder = PulseEncoder(hidden=hidden)
        self.task = BinaryTask(hidden)

    def shared_step(self, pulses, lengths, truth):
        prob = self.task(self.encoder(pulses, lengths))
        return self.task.compute_loss(prob, truth), prob


class Runner:
    def __init__(self, model, lr):
        self.model = model.cuda()
        self.optim = torch.optim.Adam(model.parameters(), lr=lr)
        self.scaler = torch.cuda.amp.GradScaler()

    def train(self, loader, epochs):
        for epoch in range(epochs):
            losses = [self.train_batch(*[t.cuda() for t in batch]) for batch in loader]
            print(f"epoch {epoch}: {sum(losses) / len(losses):.4f}")

    def train_batch(self, pulses, lengths, truth):
        self.optim.zero_grad()
        with torch.cuda.amp.autocast():
            loss, _ = self.model.shared_step(pulses, lengths, truth)  # <- here
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optim)
        self.scaler.update()
        return loss.item()
