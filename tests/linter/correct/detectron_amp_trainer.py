import time

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel


class TrainerBase:
    def train(self, start_iter, max_iter):
        self.before_train()
        for self.iter in range(start_iter, max_iter):
            self.before_step()
            self.run_step()
            self.after_step()
        self.after_train()

    def before_train(self):
        for h in self._hooks:
            h.before_train()

    def after_train(self):
        for h in self._hooks:
            h.after_train()

    def before_step(self):
        for h in self._hooks:
            h.before_step()

    def after_step(self):
        for h in self._hooks:
            h.after_step()


class SimpleTrainer(TrainerBase):
    def __init__(self, model, data_loader, optimizer, zero_grad_before_forward=False):
        model.train()
        self.model = model
        self.data_loader = data_loader
        self.optimizer = optimizer
        self._data_loader_iter_obj = None
        self.zero_grad_before_forward = zero_grad_before_forward

    @property
    def _data_loader_iter(self):
        if self._data_loader_iter_obj is None:
            self._data_loader_iter_obj = iter(self.data_loader)
        return self._data_loader_iter_obj

    def run_step(self):
        data = next(self._data_loader_iter)
        if self.zero_grad_before_forward:
            self.optimizer.zero_grad()
        loss_dict = self.model(data)
        if isinstance(loss_dict, torch.Tensor):
            losses = loss_dict
            loss_dict = {"total_loss": loss_dict}
        else:
            losses = sum(loss_dict.values())
        if not self.zero_grad_before_forward:
            self.optimizer.zero_grad()
        losses.backward()
        self.after_backward()
        self._write_metrics(loss_dict)
        self.optimizer.step()

    def after_backward(self):
        pass

    def _write_metrics(self, loss_dict):
        print({k: v.detach() for k, v in loss_dict.items()})


class AMPTrainer(SimpleTrainer):
    def __init__(
        self, model, data_loader, optimizer, grad_scaler=None, precision=torch.float16, log_grad_scaler=False
    ):
        unsupported = "AMPTrainer does not support single-process multi-device training!"
        if isinstance(model, DistributedDataParallel):
            assert not (model.device_ids and len(model.device_ids) > 1), unsupported
        assert not isinstance(model, DataParallel), unsupported
        super().__init__(model, data_loader, optimizer)
        if grad_scaler is None:
            from torch.amp import GradScaler

            grad_scaler = GradScaler("cuda")
        self.grad_scaler = grad_scaler
        self.precision = precision
        self.log_grad_scaler = log_grad_scaler

    def run_step(self):
        assert self.model.training, "[AMPTrainer] model was changed to eval mode!"
        from torch.amp import autocast

        start = time.perf_counter()
        data = next(self._data_loader_iter)
        if self.zero_grad_before_forward:
            self.optimizer.zero_grad()
        with autocast("cuda", dtype=self.precision):
            loss_dict = self.model(data)
            if isinstance(loss_dict, torch.Tensor):
                losses = loss_dict
                loss_dict = {"total_loss": loss_dict}
            else:
                losses = sum(loss_dict.values())
        if not self.zero_grad_before_forward:
            self.optimizer.zero_grad()
        self.grad_scaler.scale(losses).backward()
        if self.log_grad_scaler:
            print(self.grad_scaler.get_scale(), time.perf_counter() - start)
        self.after_backward()
        self._write_metrics(loss_dict)
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()

    def state_dict(self):
        ret = super().state_dict()
        ret["grad_scaler"] = self.grad_scaler.state_dict()
        return ret

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
