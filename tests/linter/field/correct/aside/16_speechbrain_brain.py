# style of: speechbrain/speechbrain:speechbrain/core.py
# torch: 2.3+
import logging
from contextlib import nullcontext

import torch

logger = logging.getLogger(__name__)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Brain:
    def __init__(self, modules, opt_class, precision="fp32", device="cuda", grad_accumulation_factor=1, max_grad_norm=5.0):
        self.modules = torch.nn.ModuleDict(modules).to(device)
        self.device = device
        self.precision = precision
        self.grad_accumulation_factor = grad_accumulation_factor
        self.max_grad_norm = max_grad_norm
        self.optimizer = opt_class(self.modules.parameters())
        self.step = 0
        self.optimizer_step = 0
        self.scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
        self.use_amp = precision in ("fp16", "bf16")

    def compute_forward(self, batch):
        raise NotImplementedError

    def compute_objectives(self, predictions, batch):
        raise NotImplementedError

    def autocast(self):
        if not self.use_amp:
            return nullcontext()
        return torch.autocast(device_type=torch.device(self.device).type, dtype=DTYPES[self.precision])

    def fit_batch(self, batch):
        should_step = (self.step % self.grad_accumulation_factor) == 0
        with self.autocast():
            outputs = self.compute_forward(batch)
            loss = self.compute_objectives(outputs, batch)
        self.scaler.scale(loss / self.grad_accumulation_factor).backward()
        if should_step:
            self.optimizers_step()
        return loss.detach().cpu()

    def optimizers_step(self):
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.modules.parameters(), self.max_grad_norm)
        if self.precision != "fp16" and not torch.isfinite(norm):
            # no scaler protects these modes
            logger.warning("non-finite gradient, the update is ignored")
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer_step += 1

    def fit(self, epochs, train_set, valid_set=None):
        for epoch in range(epochs):
            self.modules.train()
            for batch in train_set:
                self.step += 1
                self.fit_batch(batch)
            if valid_set is not None:
                self.modules.eval()
                with torch.no_grad():
                    losses = [self.evaluate_batch(batch) for batch in valid_set]
                logger.info("epoch %d valid %.3f", epoch, sum(losses) / len(losses))

    def evaluate_batch(self, batch):
        with self.autocast():
            out = self.compute_forward(batch)
            loss = self.compute_objectives(out, batch)
        return loss.detach().cpu().item()

    def checkpoint(self):
        return {"modules": self.modules.state_dict(), "opt": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def recover(self, state):
        self.modules.load_state_dict(state["modules"])
        self.optimizer.load_state_dict(state["opt"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
