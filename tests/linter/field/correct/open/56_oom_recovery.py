# style of: facebookresearch/fairseq:fairseq/trainer.py
# torch: 1.13+
import logging

import torch

logger = logging.getLogger(__name__)


class Trainer:
    """Single-device training that survives an oversized batch."""

    def __init__(self, cfg, model, criterion, optimizer):
        self.cfg = cfg
        self.model = model.to("cuda")
        self.criterion = criterion
        self.optimizer = optimizer
        self.scaler = torch.cuda.amp.GradScaler(init_scale=cfg.fp16_init_scale)
        self.num_updates = 0
        self.ooms = 0

    def clip(self):
        # once this has begun, the scaler holds an UNSCALED record for the optimizer
        self.scaler.unscale_(self.optimizer)
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip_norm)

    def train_step(self, sample):
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        scaled = False
        try:
            with torch.cuda.amp.autocast():
                net_output = self.model(**sample["net_input"])
                loss = self.criterion(net_output, sample["target"])
            scaled_loss = self.scaler.scale(loss)
            scaled = True
            scaled_loss.backward()
            grad_norm = self.clip()
        except torch.cuda.OutOfMemoryError as err:
            self.ooms += 1
            logger.warning("attempting to recover from OOM in forward/backward pass: %s", err)
            loss = net_output = scaled_loss = None
            self.optimizer.zero_grad(set_to_none=True)
            if scaled:
                # keep the scale, drop the record: update() without a value would look for
                # an inf check, and there may be none
                self.scaler.update(self.scaler.get_scale())
            torch.cuda.empty_cache()
            return None

        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() < before:
            logger.info("gradient overflow detected, loss scale now %s", self.scaler.get_scale())
            if self.scaler.get_scale() < self.cfg.min_loss_scale:
                raise FloatingPointError(f"minimum loss scale reached ({self.cfg.min_loss_scale})")
        else:
            self.num_updates += 1
        return {"loss": loss.item(), "grad_norm": grad_norm.item(), "ooms": self.ooms}

    def state_dict(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loss_scale": self.scaler.state_dict(),
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["loss_scale"])
        self.num_updates = state["num_updates"]
