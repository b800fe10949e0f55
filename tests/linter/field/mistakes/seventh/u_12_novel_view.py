# source: https://github.com/Haian-Jin/LVSM/pull/19
# mistake: when the gradient norm is too large both scaler.step and scaler.update are skipped, so the next iteration's unscale_ raises "has already been called"
# severity: error
import torch
import torch.nn.functional as F
from torch import nn


class ViewSynthesisTrainer:
    def __init__(self, model, config):
        self.model = model.cuda()
        self.config = config
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.05)
        self.scaler = torch.amp.GradScaler("cuda", enabled=config.use_amp)
        self.param_updates = 0

    def compute_loss(self, batch):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.config.use_amp):
            rendered = self.model(batch["context"], batch["rays"])
        return F.mse_loss(rendered.float(), batch["target"])

    def grad_norm(self):
        self.scaler.unscale_(self.optimizer)  # <- here
        return nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)

    def apply_or_skip(self, step):
        norm = self.grad_norm().item()
        if norm > self.config.skip_above:
            print(f"WARNING: step {step} grad norm {norm:.2f} > {self.config.skip_above}, skipping")
            self.optimizer.zero_grad(set_to_none=True)
            return False  # <- here
        self.scaler.step(self.optimizer)
        self.scaler.update()  # <- here
        self.optimizer.zero_grad(set_to_none=True)
        self.param_updates += 1
        return True

    def iterate(self, step, batch):
        batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
        loss = self.compute_loss(batch)
        self.scaler.scale(loss).backward()
        updated = self.apply_or_skip(step)
        return loss.item(), updated

    def train(self, loader):
        self.model.train()
        for step, batch in enumerate(loader):
            loss, updated = self.iterate(step, batch)
            if step % self.config.print_every == 0:
                psnr = -10 * torch.log10(torch.tensor(loss)).item()
                print(f"step {step} ({self.param_updates} updates) loss {loss:.5f} psnr {psnr:.2f} ok={updated}")
            if step and step % self.config.save_every == 0:
                torch.save(
                    {"m": self.model.state_dict(), "o": self.optimizer.state_dict(), "s": self.scaler.state_dict()},
                    f"{self.config.out}/{step:07d}.pt",
                )
