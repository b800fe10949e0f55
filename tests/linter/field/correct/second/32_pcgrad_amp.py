"""
# style of: wgchang/PCGrad-pytorch-example:pcgrad_amp.py
# correct: the projection is done on gradients which all carry the same scale and does not depend on it; the result is put into .grad and the scaler unscales, checks and steps as usual.
# torch: 1.10+
"""
import random
from typing import List

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PCGradAMP:
    def __init__(self, scaler: torch.cuda.amp.GradScaler, optimizer: torch.optim.Optimizer):
        self._scaler, self._optim = scaler, optimizer

    @property
    def params(self):
        return [p for g in self._optim.param_groups for p in g["params"] if p.requires_grad]

    def zero_grad(self):
        return self._optim.zero_grad(set_to_none=True)

    def _flat_gradient(self, objective: Tensor) -> Tensor:
        grads = torch.autograd.grad(
            self._scaler.scale(objective), self.params, retain_graph=True, allow_unused=True
        )
        return torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in zip(grads, self.params)])

    @staticmethod
    def _project_conflicting(grads: List[Tensor]) -> Tensor:
        projected = [g.clone() for g in grads]
        for g_i in projected:
            others = list(grads)
            random.shuffle(others)
            for g_j in others:
                inner = torch.dot(g_i, g_j)
                if inner < 0:
                    g_i -= inner / g_j.norm().pow(2) * g_j
        return torch.stack(projected).mean(0)

    def backward(self, objectives: List[Tensor]):
        merged = self._project_conflicting([self._flat_gradient(o) for o in objectives])
        chunks = merged.split([p.numel() for p in self.params])
        for p, chunk in zip(self.params, chunks):
            p.grad = chunk.view_as(p)

    def step(self, max_norm=None):
        if max_norm is not None:
            self._scaler.unscale_(self._optim)
            nn.utils.clip_grad_norm_(self.params, max_norm)
        self._scaler.step(self._optim)
        self._scaler.update()


class TwoHeads(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(36 * 36, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.left, self.right = nn.Linear(width, 10), nn.Linear(width, 10)

    def forward(self, x):
        h = self.trunk(x)
        return self.left(h), self.right(h)


def train(loader, epochs=20):
    model = TwoHeads().cuda()
    scaler = torch.cuda.amp.GradScaler(init_scale=1024.0)
    optimizer = PCGradAMP(scaler, torch.optim.Adam(model.parameters(), lr=1e-3))
    for epoch in range(epochs):
        for x, y1, y2 in loader:
            optimizer.zero_grad()
            with torch.cuda.amp.autocast():
                o1, o2 = model(x.cuda())
                losses = [F.cross_entropy(o1, y1.cuda()), F.cross_entropy(o2, y2.cuda())]
            optimizer.backward(losses)
            optimizer.step(max_norm=5.0)
        print(epoch, [round(v.item(), 4) for v in losses])
