import torch


class HookBase:
    def before_step(self):
        pass

    def after_step(self):
        pass


class LRScheduler(HookBase):
    def __init__(self, optimizer=None, scheduler=None):
        self._optimizer = optimizer
        self._scheduler = scheduler

    def after_step(self):
        lr = self._optimizer.param_groups[0]["lr"]
        self.trainer.storage.put_scalar("lr", lr, smoothing_hint=False)
        self.scheduler.step()

    @property
    def scheduler(self):
        return self._scheduler or self.trainer.scheduler


class EvalHook(HookBase):
    def __init__(self, eval_period, eval_function):
        self._period = eval_period
        self._func = eval_function

    def after_step(self):
        next_iter = self.trainer.iter + 1
        if self._period > 0 and next_iter % self._period == 0:
            with torch.no_grad():
                results = self._func()
            self.trainer.storage.put_scalars(**results)
