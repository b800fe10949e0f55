"""
# source: https://github.com/Deci-AI/super-gradients/pull/653
# mistake: clipping happens after every backward instead of once before the step, and on gradients that are still multiplied by the loss scale.
# severity: error
# torch: any
"""
import logging

import torch
from torch.cuda.amp import GradScaler, autocast

logger = logging.getLogger(__name__)


class Trainer:
    def __init__(self, experiment_name: str, net: torch.nn.Module):
        self.experiment_name = experiment_name
        self.net = net.to("cuda")
        self.scaler = None
        self.optimizer = None
        self.batch_accumulate = 1

    def train(self, training_params: dict, train_loader):
        self.training_params = training_params
        self.batch_accumulate = training_params.get("batch_accumulate", 1)
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), lr=training_params["initial_lr"], momentum=0.9, nesterov=True
        )
        self.scaler = GradScaler(enabled=training_params["mixed_precision"])
        for epoch in range(training_params["max_epochs"]):
            loss = self._train_epoch(epoch, train_loader)
            logger.info("%s epoch %d loss %.4f", self.experiment_name, epoch, loss)

    def _train_epoch(self, epoch, train_loader):
        self.net.train()
        running = 0.0
        self.optimizer.zero_grad()
        for batch_idx, (inputs, targets) in enumerate(train_loader):
            inputs, targets = inputs.cuda(non_blocking=True), targets.cuda(non_blocking=True)
            with autocast(enabled=self.training_params["mixed_precision"]):
                outputs = self.net(inputs)
                loss = torch.nn.functional.cross_entropy(outputs, targets)
            self._backward_step(loss, batch_idx, len(train_loader))
            running += loss.item()
        return running / len(train_loader)

    def _backward_step(self, loss, batch_idx: int, num_batches: int):
        self.scaler.scale(loss / self.batch_accumulate).backward()

        max_norm = self.training_params.get("clip_grad_norm")
        if max_norm:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), max_norm)  # <- here

        if (batch_idx + 1) % self.batch_accumulate == 0 or batch_idx + 1 == num_batches:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
