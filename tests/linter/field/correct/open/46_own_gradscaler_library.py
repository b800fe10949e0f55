# style of: explosion/thinc:thinc/shims/pytorch_grad_scaler.py
# torch: any
"""A gradient scaler of our own, for a framework whose optimizer takes arrays rather than modules."""
from typing import Iterable, List

import torch


class GradScaler:
    def __init__(self, enabled=False, init_scale=2.0**16, backoff=0.5, growth=2.0, growth_interval=2000):
        self._enabled = enabled
        self._scale = init_scale
        self._backoff = backoff
        self._growth = growth
        self._interval = growth_interval
        self._good_steps = 0
        self._found_inf = False

    def scale(self, tensors: Iterable[torch.Tensor]) -> List[torch.Tensor]:
        """Multiply the incoming output gradients."""
        if not self._enabled:
            return list(tensors)
        return [t * self._scale for t in tensors]

    def unscale(self, grads: Iterable[torch.Tensor]) -> bool:
        """Divide in place; True if anything overflowed. May be called once per group of arrays."""
        if not self._enabled:
            return False
        inverse = 1.0 / self._scale
        for g in grads:
            g.mul_(inverse)
            if not torch.isfinite(g).all():
                self._found_inf = True
        return self._found_inf

    def update(self) -> None:
        if not self._enabled:
            return
        if self._found_inf:
            self._scale *= self._backoff
            self._good_steps = 0
        else:
            self._good_steps += 1
            if self._good_steps == self._interval:
                self._scale *= self._growth
                self._good_steps = 0
        self._found_inf = False


class Shim:
    """Wraps a torch module; the caller hands us d(loss)/d(output) and a plain function as optimizer."""

    def __init__(self, model, mixed_precision=False):
        self._model = model
        self._mixed = mixed_precision
        self._scaler = GradScaler(enabled=mixed_precision)

    def begin_update(self, x):
        self._model.train()
        with torch.autocast("cuda", enabled=self._mixed):
            y = self._model(x)

        def backprop(dy):
            (dy,) = self._scaler.scale([dy.to(y.dtype)])
            y.backward(dy)

        return y, backprop

    def finish_update(self, update_fn):
        params = [p for p in self._model.parameters() if p.grad is not None]
        overflow = self._scaler.unscale(p.grad for p in params)
        if not overflow:
            with torch.no_grad():
                for p in params:
                    update_fn(p, p.grad)
        for p in params:
            p.grad = None
        self._scaler.update()
