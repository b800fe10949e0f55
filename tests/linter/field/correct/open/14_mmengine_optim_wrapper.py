# style of: open-mmlab/mmengine:mmengine/optim/optimizer/amp_optimizer_wrapper.py
# torch: 1.10+
from contextlib import contextmanager

import torch
from torch.cuda.amp import GradScaler


class OptimWrapper:
    def __init__(self, optimizer, accumulative_counts=1, clip_grad=None):
        self.optimizer = optimizer
        self.accumulative_counts = accumulative_counts
        self.clip_grad_kwargs = dict(clip_grad) if clip_grad else None
        self._inner_count = 0
        self._max_counts = -1
        self._remainder_counts = -1

    def initialize_count_status(self, init_counts, max_counts):
        self._inner_count = init_counts
        self._max_counts = max_counts
        self._remainder_counts = max_counts % self.accumulative_counts

    def scale_loss(self, loss):
        """Divide by the size of the window the current batch falls in."""
        if self._max_counts < 0 or self._inner_count < self._max_counts - self._remainder_counts:
            return loss / self.accumulative_counts
        return loss / max(self._remainder_counts, 1)

    def should_update(self):
        return (
            self._inner_count % self.accumulative_counts == 0
            or self._inner_count == self._max_counts
        )

    def update_params(self, loss):
        loss = self.scale_loss(loss)
        self.backward(loss)
        if self.should_update():
            self.step()
            self.optimizer.zero_grad()

    def backward(self, loss, **kwargs):
        loss.backward(**kwargs)
        self._inner_count += 1

    def _clip_grad(self):
        params = [p for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
        if params:
            torch.nn.utils.clip_grad_norm_(params, **self.clip_grad_kwargs)

    def step(self, **kwargs):
        if self.clip_grad_kwargs:
            self._clip_grad()
        self.optimizer.step(**kwargs)

    def state_dict(self):
        return self.optimizer.state_dict()


class AmpOptimWrapper(OptimWrapper):
    def __init__(self, loss_scale="dynamic", dtype=None, **kwargs):
        super().__init__(**kwargs)
        self._static_scale = None
        if loss_scale == "dynamic":
            self.loss_scaler = GradScaler()
        elif isinstance(loss_scale, float):
            self._static_scale = loss_scale
            self.loss_scaler = GradScaler(init_scale=loss_scale)
        else:
            self.loss_scaler = GradScaler(**loss_scale)
        self.cast_dtype = dtype or torch.float16

    def backward(self, loss, **kwargs):
        self.loss_scaler.scale(loss).backward(**kwargs)
        self._inner_count += 1

    def step(self, **kwargs):
        if self.clip_grad_kwargs:
            self.loss_scaler.unscale_(self.optimizer)
            self._clip_grad()
        self.loss_scaler.step(self.optimizer, **kwargs)
        self.loss_scaler.update(self._static_scale)

    def state_dict(self):
        return {**super().state_dict(), "loss_scaler": self.loss_scaler.state_dict()}

    def load_state_dict(self, state_dict):
        state_dict = dict(state_dict)
        if "loss_scaler" in state_dict:
            self.loss_scaler.load_state_dict(state_dict.pop("loss_scaler"))
        self.optimizer.load_state_dict(state_dict)

    @contextmanager
    def optim_context(self, model):
        with torch.cuda.amp.autocast(dtype=self.cast_dtype):
            yield
