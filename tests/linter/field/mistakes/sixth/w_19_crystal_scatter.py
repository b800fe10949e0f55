# source: pytorch/translate pull request #583 (same: NVlabs/WarpConvNet pull request #17)
# mistake: messages are half under autocast but are scattered in place into a float32 buffer made by torch.zeros; scatter_add_ demands equal dtypes and raises
# severity: error
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Crystal(NamedTuple):
    species: Tensor      # (N,)
    src: Tensor          # (E,)
    dst: Tensor          # (E,)
    dist: Tensor         # (E,)
    owner: Tensor        # (N,) index of the crystal
    energy: Tensor       # (B,)

    def to(self, device):
        return Crystal(*[t.to(device, non_blocking=True) for t in self])


class Radial(nn.Module):
    def __init__(self, n=64, cutoff=6.0):
        super().__init__()
        self.register_buffer("mu", torch.linspace(0, cutoff, n))
        self.gamma = (n / cutoff) ** 2 / 2

    def forward(self, d):
        return torch.exp(-self.gamma * (d.unsqueeze(-1) - self.mu) ** 2)


class Message(nn.Module):
    def __init__(self, d, r):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * d + r, d), nn.SiLU(), nn.Linear(d, d))
        self.gate = nn.Linear(2 * d + r, d)
        self.node = nn.Sequential(nn.Linear(2 * d, d), nn.SiLU(), nn.Linear(d, d))
        self.norm = nn.LayerNorm(d)

    def forward(self, h, src, dst, rbf):
        z = torch.cat([h[src], h[dst], rbf], -1)
        msg = self.edge(z) * torch.sigmoid(self.gate(z))
        pooled = torch.zeros(h.size(0), msg.size(1), device=h.device)  # <- here
        pooled.scatter_add_(0, dst.unsqueeze(1).expand_as(msg), msg)  # <- here
        return self.norm(h + self.node(torch.cat([h, pooled], -1)))


class EnergyNet(nn.Module):
    def __init__(self, d=128, layers=4, species=100):
        super().__init__()
        self.emb = nn.Embedding(species, d)
        self.radial = Radial()
        self.layers = nn.ModuleList(Message(d, 64) for _ in range(layers))
        self.read = nn.Sequential(nn.Linear(d, d // 2), nn.SiLU(), nn.Linear(d // 2, 1))

    def forward(self, c: Crystal):
        h = self.emb(c.species)
        rbf = self.radial(c.dist)
        for layer in self.layers:
            h = layer(h, c.src, c.dst, rbf)
        atom = self.read(h).squeeze(-1).float()
        total = torch.zeros(c.energy.size(0), device=atom.device)
        return total.index_add(0, c.owner, atom)


def fit(train, valid, epochs=300, device="cuda"):
    net = EnergyNet().to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=5e-4, weight_decay=1e-6)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.6, patience=8)
    scaler = torch.amp.GradScaler(device)
    best = float("inf")
    for epoch in range(epochs):
        net.train()
        for batch in train:
            batch = batch.to(device)
            with torch.autocast(device, dtype=torch.float16):
                pred = net(batch)
            loss = nn.functional.huber_loss(pred, batch.energy, delta=0.01)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            scaler.step(opt)
            scaler.update()
        net.eval()
        err, n = 0.0, 0
        with torch.no_grad():
            for batch in valid:
                batch = batch.to(device)
                err += (net(batch) - batch.energy).abs().sum().item()
                n += batch.energy.numel()
        plateau.step(err / n)
        if err / n < best:
            best = err / n
            torch.save(net.state_dict(), "energy_best.pt")
        print(f"{epoch} mae {err / n:.5f} best {best:.5f}")
