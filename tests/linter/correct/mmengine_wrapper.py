from contextlib import contextmanager

import torch
from torch.amp import GradScaler


class OptimWrapper:
    def __init__(self, optimizer, accumulative_counts=1, clip_grad=None):
        self.optimizer = optimizer
        self._accumulative_counts = accumulative_counts
        self.clip_grad = clip_grad
        self._inner_count = 0

    def update_params(self, loss):
        loss = self.scale_loss(loss)
        self.backward(loss)
        if self.should_update():
            self.step()
            self.zero_grad()

    def scale_loss(self, loss):
        return loss / self._accumulative_counts

    def should_update(self):
        return self._inner_count % self._accumulative_counts == 0

    def zero_grad(self):
        self.optimizer.zero_grad()


class AmpOptimWrapper(OptimWrapper):
    def __init__(self, loss_scale="dynamic", dtype=None, **kwargs):
        super().__init__(**kwargs)
        self.dtype = dtype
        self.loss_scaler = GradScaler("cuda")

    def backward(self, loss, **kwargs):
        self.loss_scaler.scale(loss).backward(**kwargs)
        self._inner_count += 1

    def step(self, **kwargs):
        if self.clip_grad:
            self.loss_scaler.unscale_(self.optimizer)
            self._clip_grad()
        self.loss_scaler.step(self.optimizer, **kwargs)
        self.loss_scaler.update()

    def _clip_grad(self):
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, **self.clip_grad)

    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict(), "loss_scaler": self.loss_scaler.state_dict()}

    def load_state_dict(self, state_dict):
        self.loss_scaler.load_state_dict(state_dict.pop("loss_scaler"))
        self.optimizer.load_state_dict(state_dict["optimizer"])

    @contextmanager
    def optim_context(self, model):
        with torch.autocast("cuda", dtype=self.dtype):
            yield
