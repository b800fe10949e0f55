"""
# style of: facebookresearch/fvcore:fvcore/common/checkpoint.py
# correct: the checkpointer saves and restores whatever has been registered by keyword, the scaler among it; nothing makes a new scaler after the resume.
# torch: 1.10+
"""
import os
from typing import Any, Dict

import torch
from torch import nn


class Checkpointer:
    def __init__(self, model: nn.Module, save_dir: str = "", **checkpointables: Any):
        self.model = model
        self.save_dir = save_dir
        self.checkpointables: Dict[str, Any] = {}
        for name, obj in checkpointables.items():
            self.add_checkpointable(name, obj)

    def add_checkpointable(self, key: str, checkpointable: Any):
        if not hasattr(checkpointable, "state_dict"):
            raise ValueError(f"{key} has no state_dict()")
        self.checkpointables[key] = checkpointable

    def save(self, name: str, **extra):
        data = {"model": self.model.state_dict(), **extra}
        for key, obj in self.checkpointables.items():
            data[key] = obj.state_dict()
        os.makedirs(self.save_dir, exist_ok=True)
        torch.save(data, os.path.join(self.save_dir, f"{name}.pth"))
        with open(os.path.join(self.save_dir, "last_checkpoint"), "w") as f:
            f.write(f"{name}.pth")

    def resume_or_load(self) -> Dict[str, Any]:
        marker = os.path.join(self.save_dir, "last_checkpoint")
        if not os.path.exists(marker):
            return {}
        with open(marker) as f:
            checkpoint = torch.load(os.path.join(self.save_dir, f.read().strip()), map_location="cpu")
        self.model.load_state_dict(checkpoint.pop("model"))
        for key, obj in self.checkpointables.items():
            if key in checkpoint:
                obj.load_state_dict(checkpoint.pop(key))
        return checkpoint


def do_train(cfg, model, data_loader):
    model.train().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, cfg.steps, gamma=0.1)
    grad_scaler = torch.cuda.amp.GradScaler(enabled=cfg.amp)
    checkpointer = Checkpointer(
        model, cfg.output_dir, optimizer=optimizer, scheduler=scheduler, grad_scaler=grad_scaler
    )
    start = checkpointer.resume_or_load().get("iteration", -1) + 1

    for iteration, data in zip(range(start, cfg.max_iter), data_loader):
        with torch.autocast("cuda", dtype=torch.float16, enabled=cfg.amp):
            loss_dict = model(data)
            losses = sum(loss_dict.values())
        optimizer.zero_grad()
        grad_scaler.scale(losses).backward()
        scale = grad_scaler.get_scale()
        grad_scaler.step(optimizer)
        grad_scaler.update()
        if grad_scaler.get_scale() >= scale:
            scheduler.step()
        if iteration % 20 == 0:
            print(iteration, {k: round(v.item(), 4) for k, v in loss_dict.items()})
        if (iteration + 1) % cfg.checkpoint_period == 0:
            checkpointer.save(f"model_{iteration:07d}", iteration=iteration)
