# source: https://github.com/languini-kitchen/languini-kitchen/pull/7
# mistake: gradient norms are logged before the gradients are unscaled, so the curves show the loss scale (and its jumps) rather than the gradients.
# severity: warning
# torch: any
import torch
import torch.nn as nn
from torch.utils.tensorboard import SummaryWriter


class LMTrainer:
    def __init__(self, config, model, train_batches, writer: SummaryWriter):
        self.c = config
        self.model = model.to(config.device)
        self.batches = train_batches
        self.writer = writer
        self.opt = torch.optim.Adam(model.parameters(), lr=config.max_lr)
        self.scaler = torch.amp.GradScaler("cuda", enabled=config.use_amp)

    def log_gradients(self, step):
        total = 0.0
        for name, param in self.model.named_parameters():
            if param.grad is None:
                continue
            norm = param.grad.detach().norm(2)
            total += norm.item() ** 2
            self.writer.add_scalar(f"grads/{name}", norm.item(), step)
        self.writer.add_scalar("grads/_total", total**0.5, step)

    def train(self):
        self.model.train()
        for step in range(self.c.train_steps):
            x, y = next(self.batches)
            with torch.autocast("cuda", dtype=torch.float16, enabled=self.c.use_amp):
                logits = self.model(x.to(self.c.device))
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.to(self.c.device).flatten())
            self.scaler.scale(loss).backward()

            if step % self.c.log_grads_every == 0:
                self.log_gradients(step)  # <- here

            if self.c.grad_clip_norm > 0:
                self.scaler.unscale_(self.opt)
                nn.utils.clip_grad_norm_(self.model.parameters(), self.c.grad_clip_norm)
            self.scaler.step(self.opt)
            self.scaler.update()
            self.opt.zero_grad(set_to_none=True)
            self.writer.add_scalar("train/loss", loss.item(), step)
