# source: https://github.com/facebookresearch/fairchem/pull/617
# mistake: the scaled loss is divided by get_scale() after update() has changed the scale, so the recorded loss, which also drives the plateau schedule, is off by the growth or backoff factor
# severity: warning
import logging
from collections import defaultdict

import torch
from torch import nn
from torch_geometric.nn import global_add_pool


class RadialBasis(nn.Module):
    def __init__(self, n=64, cutoff=6.0):
        super().__init__()
        self.register_buffer("centres", torch.linspace(0, cutoff, n))
        self.gamma = (n / cutoff) ** 2

    def forward(self, d):
        return torch.exp(-self.gamma * (d[:, None] - self.centres).square())


class EnergyNet(nn.Module):
    def __init__(self, dim=256, rounds=4):
        super().__init__()
        self.atoms = nn.Embedding(100, dim)
        self.basis = RadialBasis()
        self.filters = nn.ModuleList(nn.Sequential(nn.Linear(64, dim), nn.SiLU(), nn.Linear(dim, dim)) for _ in range(rounds))
        self.updates = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim)) for _ in range(rounds))
        self.readout = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 1))

    def forward(self, g):
        src, dst = g.edge_index
        rbf = self.basis((g.pos[src] - g.pos[dst]).norm(dim=-1))
        h = self.atoms(g.z)
        for make_filter, update in zip(self.filters, self.updates):
            message = (h[src] * make_filter(rbf)).float()
            h = h + update(torch.zeros_like(h).index_add(0, dst, message)).float()
        return global_add_pool(self.readout(h).float(), g.batch).squeeze(-1)


class EnergyTrainer:
    def __init__(self, mean, std, lr=2e-4):
        self.net = EnergyNet().cuda()
        self.mean, self.std = mean, std
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=lr)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=3)
        self.scaler = torch.amp.GradScaler("cuda", growth_interval=500)
        self.metrics = defaultdict(list)

    def compute_loss(self, g):
        with torch.autocast("cuda", dtype=torch.float16):
            energy = self.net(g)
        return nn.functional.l1_loss(energy, (g.y - self.mean) / self.std)

    def _backward(self, loss):
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), 10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train(self, loader, epochs):
        for epoch in range(epochs):
            self.metrics["loss"].clear()
            for g in loader:
                loss = self.scaler.scale(self.compute_loss(g.to("cuda")))
                self._backward(loss)
                scale = self.scaler.get_scale()  # <- here
                self.metrics["loss"].append(loss.item() / scale)  # <- here
            average = sum(self.metrics["loss"]) / len(self.metrics["loss"])
            self.plateau.step(average)
            logging.info("epoch %d mae %.4f eV", epoch, average * self.std)
