"""
# source: https://github.com/microsoft/ptgnn/pull/17
# mistake: the loss is overwritten by its scaled value before it is added to the epoch's total, so the reported training loss is the loss times the current scale.
# severity: warning
# torch: any
"""
import logging
import time
from contextlib import ExitStack

import torch


class ModelTrainer:
    LOGGER = logging.getLogger(__name__)

    def __init__(self, model, *, max_num_epochs=100, minibatch_size=200, clip_gradient_norm=None, enable_amp=False):
        self.__model = model
        self.__max_num_epochs = max_num_epochs
        self.__minibatch_size = minibatch_size
        self.__clip_gradient_norm = clip_gradient_norm
        self.__enable_amp = enable_amp

    @property
    def neural_module(self):
        return self.__model.module

    def _run_training(self, training_tensors, epoch, device, optimizer, scheduler, scaler):
        num_minibatches, num_samples, sum_epoch_loss = 0, 0, 0.0
        start = time.time()
        self.neural_module.train()
        for mb_data, raw_samples in self.__model.minibatch_iterator(
            training_tensors, device=device, max_size=self.__minibatch_size
        ):
            optimizer.zero_grad()
            with ExitStack() as stack:
                if self.__enable_amp:
                    stack.enter_context(torch.cuda.amp.autocast())
                mb_loss = self.neural_module(**mb_data)

            if self.__enable_amp:
                mb_loss = scaler.scale(mb_loss)
            mb_loss.backward()

            if self.__clip_gradient_norm is not None:
                if self.__enable_amp:
                    scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(self.neural_module.parameters(), self.__clip_gradient_norm)

            if self.__enable_amp:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            if scheduler is not None:
                scheduler.step(epoch_idx=epoch, epoch_step=num_minibatches)

            num_minibatches += 1
            num_samples += len(raw_samples)
            sum_epoch_loss += mb_loss.item()  # <- here

        elapsed = time.time() - start
        self.LOGGER.info("Training complete in %.1fsec [%.2f samples/sec]", elapsed, num_samples / elapsed)
        mean_loss = sum_epoch_loss / num_minibatches
        self.LOGGER.info("Epoch %d: Train Loss %.2f", epoch, mean_loss)
        return mean_loss

    def train(self, data, device="cuda", optimizer=None, scheduler=None):
        self.neural_module.to(device)
        optimizer = optimizer or torch.optim.Adam(self.neural_module.parameters())
        scaler = torch.cuda.amp.GradScaler(enabled=self.__enable_amp)
        best = float("inf")
        for epoch in range(self.__max_num_epochs):
            best = min(best, self._run_training(data, epoch, device, optimizer, scheduler, scaler))
        return best
