# style of: pytorch/torchtune:torchtune/training/_grad_scaler.py
# torch: 2.3+
import torch
import torch.nn.functional as F


def scale_grads_(model: torch.nn.Module, factor: torch.Tensor) -> None:
    """Multiply every gradient in place; called on true (unscaled) gradients only."""
    device = None
    for p in model.parameters():
        if device is None:
            device = p.device
            factor = factor.to(device)
        if p.grad is not None:
            p.grad *= factor


class FinetuneRecipe:
    """Token-weighted accumulation: sum the losses, then divide the gradients by the token count."""

    def __init__(self, model, optimizer, accumulation, max_norm=1.0, ignore_index=-100):
        self.model = model
        self.optimizer = optimizer
        self.accumulation = accumulation
        self.max_norm = max_norm
        self.ignore_index = ignore_index
        self.grad_scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)

    def loss_step(self, batch):
        tokens, labels = batch["tokens"].cuda(), batch["labels"].cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            logits = self.model(tokens)
        return F.cross_entropy(
            logits.float().flatten(0, 1),
            labels.flatten(),
            ignore_index=self.ignore_index,
            reduction="sum",
        )

    def train_epoch(self, loader):
        running_loss, num_tokens = 0.0, 0
        self.optimizer.zero_grad(set_to_none=True)
        for idx, batch in enumerate(loader):
            num_tokens += (batch["labels"] != self.ignore_index).sum()
            loss = self.loss_step(batch)
            running_loss += loss.detach()
            self.grad_scaler.scale(loss).backward()

            last = idx + 1 == len(loader)
            if (idx + 1) % self.accumulation == 0 or last:
                self.grad_scaler.unscale_(self.optimizer)
                scale_grads_(self.model, 1.0 / num_tokens)
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
                self.grad_scaler.step(self.optimizer)
                self.grad_scaler.update()
                self.optimizer.zero_grad(set_to_none=True)
                yield {"loss": (running_loss / num_tokens).item(), "grad_norm": norm.item()}
                running_loss, num_tokens = 0.0, 0
