# why correct: when a step is left out for an odd norm, scaler.step is skipped but scaler.update still runs on what unscale_ recorded
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class StepReport:
    loss: float
    norm: float
    applied: bool


class SpikeGuard:
    """Running mean of the gradient norm; says whether a new norm is out of the ordinary."""

    def __init__(self, factor=6.0, momentum=0.98, grace=200):
        self.factor, self.momentum, self.grace = factor, momentum, grace
        self.mean, self.seen = 0.0, 0

    def odd(self, norm: float) -> bool:
        return self.seen >= self.grace and norm > self.factor * self.mean

    def learn(self, norm: float):
        self.seen += 1
        self.mean = norm if self.seen == 1 else self.momentum * self.mean + (1 - self.momentum) * norm


class SceneFlow(nn.Module):
    def __init__(self, backbone: nn.Module, width: int):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        a, b = self.backbone(first), self.backbone(second)
        match = torch.softmax((a * a.size(-1) ** -0.5) @ b.transpose(1, 2), -1) @ b
        return self.head(torch.cat([a, match.to(a.dtype)], -1))


def end_point_error(pred: Tensor, flow: Tensor, valid: Tensor) -> Tensor:
    err = (pred.float() - flow).norm(dim=-1)
    return (err * valid).sum() / valid.sum().clamp(min=1)


class FlowTrainer:
    def __init__(self, model: SceneFlow, lr: float = 2e-4):
        self.model = model.cuda()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=1e-4)
        self.scaler = torch.amp.GradScaler("cuda")
        self.guard = SpikeGuard()

    def step(self, first, second, flow, valid) -> StepReport:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            pred = self.model(first, second)
        loss = end_point_error(pred, flow, valid)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()

        applied = not self.guard.odd(norm)
        if applied:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        if norm < float("inf"):
            self.guard.learn(norm)
        return StepReport(loss.item(), norm, applied)

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "guard": vars(self.guard),
        }


def train(model, loader, epochs, path):
    trainer = FlowTrainer(model)
    for epoch in range(epochs):
        model.train()
        left_out = 0
        for batch in loader:
            report = trainer.step(*(t.cuda(non_blocking=True) for t in batch))
            left_out += not report.applied
        print(f"epoch {epoch}: {report.loss:.4f}, {left_out} steps left out")
        torch.save(trainer.state(), path)
