"""
# source: https://github.com/languini-kitchen/languini-kitchen/pull/7
# mistake: the gradient statistics are logged before anything unscales, so the curves show the gradients times the loss scale and jump whenever the scale changes.
# severity: warning
# torch: any
"""
import contextlib
import time

import torch


def log_grad_stats(logger, model, step):
    total = 0.0
    for name, p in model.named_parameters():
        if p.grad is not None:
            norm = p.grad.detach().norm().item()  # <- here
            logger.log({f"grad_norm/{name}": norm}, step)
            total += norm**2
    logger.log({"grad_norm/_total": total**0.5}, step)


class LMTrainer:
    def __init__(self, config, logger, model, opt, scheduler, train_batches):
        self.c = config
        self.logger = logger
        self.model = model
        self.opt = opt
        self.scheduler = scheduler
        self.train_batches = train_batches
        self.scaler = torch.cuda.amp.GradScaler(enabled=self.c.dtype == "float16")

    def _ctx(self):
        if self.c.device == "cpu":
            return contextlib.nullcontext()
        return torch.autocast("cuda", dtype=getattr(torch, self.c.dtype))

    def train(self):
        state = None
        tick = time.time()
        for step in range(self.c.max_train_steps):
            self.opt.zero_grad(set_to_none=True)
            for micro in range(self.c.gradient_accumulation_steps):
                x, y = next(self.train_batches)
                with self._ctx():
                    logits, state = self.model(x, state)
                    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
                    loss = loss / self.c.gradient_accumulation_steps
                self.scaler.scale(loss).backward()

            if step % self.c.log_grads_every == 0:
                log_grad_stats(self.logger, self.model, step)

            before = self.scaler.get_scale()
            self.scaler.step(self.opt)
            self.scaler.update()
            if self.scaler.get_scale() >= before:
                self.scheduler.step()
            if step % 100 == 0:
                self.logger.log({"train/loss": loss.item() * self.c.gradient_accumulation_steps}, step)
                self.logger.log({"train/sec_per_100": time.time() - tick}, step)
                tick = time.time()
