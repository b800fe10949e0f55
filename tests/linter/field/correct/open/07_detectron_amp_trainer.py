# style of: facebookresearch/detectron2:detectron2/engine/train_loop.py
# torch: 1.10+
import time

import torch


class PlainTrainer:
    def __init__(self, model, data_loader, optimizer):
        model.train()
        self.model = model
        self.optimizer = optimizer
        self.data_loader = data_loader
        self._iterator = None
        self.iter = 0

    @property
    def batches(self):
        if self._iterator is None:
            self._iterator = iter(self.data_loader)
        return self._iterator

    def run_step(self):
        data = next(self.batches)
        losses = sum(self.model(data).values())
        self.optimizer.zero_grad()
        losses.backward()
        self.optimizer.step()

    def state_dict(self):
        return {"iteration": self.iter, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.iter = state["iteration"]
        self.optimizer.load_state_dict(state["optimizer"])


class HalfPrecisionTrainer(PlainTrainer):
    def __init__(self, model, data_loader, optimizer, grad_scaler=None, precision=torch.float16):
        super().__init__(model, data_loader, optimizer)
        if grad_scaler is None:
            from torch.cuda.amp import GradScaler

            grad_scaler = GradScaler()
        self.grad_scaler = grad_scaler
        self.precision = precision
        self.history = []

    def run_step(self):
        assert self.model.training, "model was switched to eval mode"
        from torch.cuda.amp import autocast

        start = time.perf_counter()
        data = next(self.batches)
        data_time = time.perf_counter() - start

        self.optimizer.zero_grad()
        with autocast(dtype=self.precision):
            loss_dict = self.model(data)
            if isinstance(loss_dict, torch.Tensor):
                losses = loss_dict
                loss_dict = {"total_loss": loss_dict}
            else:
                losses = sum(loss_dict.values())

        self.grad_scaler.scale(losses).backward()
        self.history.append((data_time, {k: v.detach().cpu().item() for k, v in loss_dict.items()}))
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        self.iter += 1

    def state_dict(self):
        ret = super().state_dict()
        ret["grad_scaler"] = self.grad_scaler.state_dict()
        return ret

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.grad_scaler.load_state_dict(state["grad_scaler"])
