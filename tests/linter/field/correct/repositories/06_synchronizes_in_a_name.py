# source: the training loop of a diffusion trainer, re-expressed: a name holds whether gradients synchronize
import torch
from accelerate import Accelerator


class Trainer:
    def __init__(self, model, optimizer, loader, settings):
        self.accelerator = Accelerator(mixed_precision=settings.mixed_precision)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.settings = settings

    def run(self):
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(batch)
                self.accelerator.backward(loss)
                should_clip = self.accelerator.sync_gradients and self.settings.max_grad_norm > 0
                if should_clip:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
