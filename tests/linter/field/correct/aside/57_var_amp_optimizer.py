# style of: FoundationVision/VAR:utils/amp_sc.py
# torch: 2.0+
import math
from contextlib import nullcontext
from typing import List, Optional, Tuple

import torch

MAX_SCALE = 2.0**15


class AmpOptimizer:
    """0: full precision, 1: float16 with a scaler, 2: bfloat16 without one."""

    def __init__(
        self,
        mixed_precision: int,
        optimizer: torch.optim.Optimizer,
        params: List[torch.nn.Parameter],
        grad_clip: float = 0.0,
        n_accum: int = 1,
    ):
        self.optimizer = optimizer
        self.params = params
        self.grad_clip = grad_clip
        self.r_accum = 1.0 / n_accum
        if mixed_precision == 0:
            self.amp_ctx, self.scaler = nullcontext(), None
        elif mixed_precision == 1:
            self.amp_ctx = torch.autocast("cuda", dtype=torch.float16)
            self.scaler = torch.cuda.amp.GradScaler(init_scale=2.0**11, growth_interval=1000)
        else:
            self.amp_ctx = torch.autocast("cuda", dtype=torch.bfloat16)
            self.scaler = None

    def backward_clip_step(
        self, stepping: bool, loss: torch.Tensor
    ) -> Tuple[Optional[torch.Tensor], Optional[float]]:
        norm = log2_scale = None
        loss = loss.mul(self.r_accum)
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()
        if not stepping:
            return norm, log2_scale

        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.grad_clip > 0:
            norm = torch.nn.utils.clip_grad_norm_(self.params, self.grad_clip)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            scale = self.scaler.get_scale()
            log2_scale = math.log2(scale)
            if scale > MAX_SCALE:
                self.scaler.update(new_scale=MAX_SCALE)  # a ceiling on the scale
            else:
                self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, log2_scale

    def state_dict(self):
        state = {"optimizer": self.optimizer.state_dict()}
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])


def train_step(model, criterion, amp_opt: AmpOptimizer, x, y, stepping: bool):
    with amp_opt.amp_ctx:
        loss = criterion(model(x), y)
    return amp_opt.backward_clip_step(stepping, loss)
