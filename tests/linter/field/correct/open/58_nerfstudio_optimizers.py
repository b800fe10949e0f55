# style of: nerfstudio-project/nerfstudio:nerfstudio/engine/optimizers.py
# torch: 1.12+
from typing import Dict, List

import torch
from torch.cuda.amp.grad_scaler import GradScaler
from torch.nn.parameter import Parameter


class Optimizers:
    """One optimizer (and perhaps one scheduler) per named group of parameters."""

    def __init__(self, config: Dict[str, dict], param_groups: Dict[str, List[Parameter]]):
        self.config = config
        self.parameters = param_groups
        self.optimizers, self.schedulers = {}, {}
        for name, params in param_groups.items():
            self.optimizers[name] = torch.optim.Adam(params, lr=config[name]["lr"], eps=1e-15)
            if config[name].get("gamma"):
                self.schedulers[name] = torch.optim.lr_scheduler.ExponentialLR(
                    self.optimizers[name], gamma=config[name]["gamma"]
                )

    def zero_grad_some(self, names):
        for name in names:
            self.optimizers[name].zero_grad()

    def optimizer_scaler_step_some(self, grad_scaler: GradScaler, names):
        for name in names:
            optimizer = self.optimizers[name]
            max_norm = self.config[name].get("max_norm")
            if max_norm is not None:
                grad_scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(self.parameters[name], max_norm)
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                grad_scaler.step(optimizer)

    def scheduler_step_all(self):
        for scheduler in self.schedulers.values():
            scheduler.step()

    def state_dict(self):
        return {k: v.state_dict() for k, v in self.optimizers.items()}


class Trainer:
    def __init__(self, pipeline, optimizers: Optimizers, mixed_precision=True, use_grad_scaler=True, device="cuda"):
        self.pipeline = pipeline
        self.optimizers = optimizers
        self.mixed_precision = mixed_precision
        self.device = device
        self.grad_scaler = GradScaler(enabled=use_grad_scaler)

    def train_iteration(self, step: int):
        # camera poses are refined every other step only
        names = [n for n in self.optimizers.optimizers if n != "camera_opt" or step % 2 == 0]
        self.optimizers.zero_grad_some(self.optimizers.optimizers)
        with torch.autocast(device_type="cuda", enabled=self.mixed_precision):
            loss_dict = self.pipeline.get_train_loss_dict(step=step)
            loss = sum(loss_dict.values())
        self.grad_scaler.scale(loss).backward()
        self.optimizers.optimizer_scaler_step_some(self.grad_scaler, names)

        scale = self.grad_scaler.get_scale()
        self.grad_scaler.update()
        # a smaller scale means that a step was skipped
        if scale <= self.grad_scaler.get_scale():
            self.optimizers.scheduler_step_all()
        return loss.detach(), loss_dict

    def save_checkpoint(self, path, step):
        torch.save(
            {
                "step": step,
                "pipeline": self.pipeline.state_dict(),
                "optimizers": self.optimizers.state_dict(),
                "schedulers": {k: v.state_dict() for k, v in self.optimizers.schedulers.items()},
                "scalers": self.grad_scaler.state_dict(),
            },
            path,
        )
