"""
# source: https://github.com/pytorch/pytorch/issues/51730
# mistake: under autocast the layer norm's output is float32 and the linear layer's messages are float16; scatter_add does not promote, so the second layer raises RuntimeError.
# severity: error
# torch: any
"""
import torch
import torch.nn.functional as F
from torch import nn


class MessageLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.message = nn.Linear(2 * dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, edge_index):
        src, dst = edge_index
        msg = self.message(torch.cat([x[src], x[dst]], dim=-1))
        index = dst.unsqueeze(-1).expand_as(msg)
        pooled = torch.zeros_like(x).scatter_add(0, index, msg)  # <- here
        return self.norm(x + F.relu(pooled))


class Forecaster(nn.Module):
    def __init__(self, n_in, n_out, dim=256, layers=8):
        super().__init__()
        self.embed = nn.Linear(n_in, dim)
        self.layers = nn.ModuleList(MessageLayer(dim) for _ in range(layers))
        self.readout = nn.Linear(dim, n_out)

    def forward(self, x, edge_index):
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h, edge_index)
        return x[..., : self.readout.out_features] + self.readout(h)


def rollout_loss(model, states, edge_index, weights):
    loss, x = 0.0, states[0]
    for target in states[1:]:
        x = model(x, edge_index)
        loss = loss + (weights * (x.float() - target).pow(2)).mean()
    return loss / (len(states) - 1)


def train(model, dataset, edge_index, weights, epochs=10, lr=1e-3, device="cuda"):
    model = model.to(device)
    edge_index, weights = edge_index.to(device), weights.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler(device)
    for epoch in range(epochs):
        model.train()
        for states in dataset:
            states = [s.to(device) for s in states]
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.float16):
                loss = rollout_loss(model, states, edge_index, weights)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 32.0)
            scaler.step(optimizer)
            scaler.update()
        print(epoch, loss.item())
