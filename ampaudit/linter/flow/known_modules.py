"""Modules of other projects, each written down as what it does to gradients, and followed like a file.

Sources: documentation and code of timm 0.4 to 1.0, and of SpeechBrain 0.5 to 1.0, whose ``check_gradients``
clips in 0.5, where it is given the loss.
"""

from __future__ import annotations

from typing import Final

__all__ = ["KNOWN_MODULES"]

_TIMM_SCALERS: Final = """
import torch


class NativeScaler:
    def __init__(self, device="cuda"):
        self._scaler = torch.amp.GradScaler(device)

    def __call__(self, loss, optimizer, clip_grad=None, clip_mode="norm", parameters=None,
                 create_graph=False, need_update=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if need_update:
            if clip_grad is not None:
                self._scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state):
        self._scaler.load_state_dict(state)
"""
_SPEECHBRAIN: Final = """
import torch


class Brain:
    def __init__(self, modules=None, opt_class=None, hparams=None, run_opts=None, checkpointer=None):
        self.scaler = torch.amp.GradScaler("cuda", enabled=run_opts["precision"] == "fp16")

    def check_gradients(self, loss=None):
        if loss is not None:
            torch.nn.utils.clip_grad_norm_(self.modules.parameters(), self.max_grad_norm)
        return True

    def optimizers_step(self):
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.modules.parameters(), self.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
"""
KNOWN_MODULES: Final = {
    "timm.utils": _TIMM_SCALERS,
    "timm.utils.cuda": _TIMM_SCALERS,
    "speechbrain": _SPEECHBRAIN,
    "speechbrain.core": _SPEECHBRAIN,
}
