# why correct: one scaler for three optimizers: each is unscaled and stepped once, then a single update() closes the iteration
from dataclasses import dataclass
from typing import Dict

import torch
from torch import nn, optim


@dataclass
class Task:
    head: nn.Module
    loss: nn.Module
    weight: float
    clip: float


class MultiTaskTrainer:
    def __init__(self, trunk: nn.Module, tasks: Dict[str, Task], device="cuda", fp16=True):
        self.device, self.fp16, self.tasks = device, fp16, tasks
        self.trunk = trunk.to(device)
        for t in tasks.values():
            t.head.to(device)
        self.optimizers = {"trunk": optim.SGD(trunk.parameters(), 0.02, momentum=0.9, weight_decay=1e-4)}
        self.optimizers.update({n: optim.Adam(t.head.parameters(), 1e-3) for n, t in tasks.items()})
        self.scaler = torch.amp.GradScaler(device, enabled=fp16)

    def losses(self, images, labels):
        with torch.autocast(self.device, dtype=torch.float16, enabled=self.fp16):
            feats = self.trunk(images)
            return {n: t.loss(t.head(feats), labels[n]) for n, t in self.tasks.items()}

    def backward(self, losses):
        names = list(losses)
        for n in names:
            self.scaler.scale(self.tasks[n].weight * losses[n]).backward(retain_graph=n != names[-1])

    def clip(self):
        for name, optimizer in self.optimizers.items():
            self.scaler.unscale_(optimizer)
            module = self.trunk if name == "trunk" else self.tasks[name].head
            limit = 5.0 if name == "trunk" else self.tasks[name].clip
            nn.utils.clip_grad_norm_(module.parameters(), limit)

    def apply(self):
        for optimizer in self.optimizers.values():
            self.scaler.step(optimizer)
        self.scaler.update()

    def iteration(self, images, labels):
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        losses = self.losses(images.to(self.device), {k: v.to(self.device) for k, v in labels.items()})
        self.backward(losses)
        self.clip()
        self.apply()
        return {k: v.item() for k, v in losses.items()}

    def state(self):
        return {"trunk": self.trunk.state_dict(), "heads": {n: t.head.state_dict() for n, t in self.tasks.items()},
                "optim": {n: o.state_dict() for n, o in self.optimizers.items()}, "scaler": self.scaler.state_dict()}


def main(loader, trunk):
    tasks = {
        "age": Task(nn.Linear(512, 1), nn.SmoothL1Loss(), 0.1, 1.0),
        "sex": Task(nn.Linear(512, 2), nn.CrossEntropyLoss(), 1.0, 1.0),
    }
    trainer = MultiTaskTrainer(trunk, tasks)
    for epoch in range(30):
        for images, labels in loader:
            out = trainer.iteration(images, labels)
        print(epoch, out)
        torch.save(trainer.state(), f"faces_{epoch:02d}.pt")
