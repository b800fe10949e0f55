"""
# source: https://github.com/allenai/allennlp/pull/5426
# mistake: rescale_gradients() clips and measures the norm while the scaler's factor is still in the gradients; nothing unscales them before scaler.step().
# severity: error
# torch: any
"""
from typing import Any, Dict, Iterable, Optional

import torch
from torch import amp
from torch.nn.utils import clip_grad_norm_


class GradientDescentTrainer:
    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: Iterable[Dict[str, Any]],
        num_epochs: int = 20,
        grad_norm: Optional[float] = None,
        use_amp: bool = False,
    ):
        self.model = model.cuda()
        self.optimizer = optimizer
        self.data_loader = data_loader
        self._num_epochs = num_epochs
        self._grad_norm = grad_norm
        self._scaler: Optional[amp.GradScaler] = None
        self._use_amp = use_amp
        if use_amp:
            self._scaler = amp.GradScaler("cuda")

    def rescale_gradients(self) -> float:
        parameters_to_clip = [p for p in self.model.parameters() if p.grad is not None]
        if self._grad_norm:
            return clip_grad_norm_(parameters_to_clip, self._grad_norm)  # <- here
        return torch.norm(torch.stack([torch.norm(p.grad.detach()) for p in parameters_to_clip]))

    def batch_outputs(self, batch, for_training: bool):
        output_dict = self.model(**batch)
        if for_training and "loss" not in output_dict:
            raise RuntimeError("the model returned no loss")
        return output_dict

    def _train_epoch(self, epoch: int) -> Dict[str, float]:
        self.model.train()
        train_loss, norms, batches = 0.0, 0.0, 0
        for batch in self.data_loader:
            for param_group in self.optimizer.param_groups:
                for p in param_group["params"]:
                    p.grad = None

            with amp.autocast("cuda", enabled=self._use_amp):
                loss = self.batch_outputs(batch, for_training=True)["loss"]
            train_loss += loss.item()

            if self._scaler is not None:
                self._scaler.scale(loss).backward()
            else:
                loss.backward()

            norms += float(self.rescale_gradients())

            if self._scaler is not None:
                self._scaler.step(self.optimizer)
                self._scaler.update()
            else:
                self.optimizer.step()
            batches += 1
        return {"loss": train_loss / batches, "grad_norm": norms / batches}

    def train(self):
        return [self._train_epoch(e) for e in range(self._num_epochs)]
