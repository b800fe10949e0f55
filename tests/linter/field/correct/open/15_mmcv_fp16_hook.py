# style of: open-mmlab/mmcv:mmcv/runner/hooks/optimizer.py
# torch: 1.6+
from torch.cuda.amp import GradScaler
from torch.nn.utils import clip_grad


class Hook:
    def before_run(self, runner):
        pass

    def after_train_iter(self, runner):
        pass


class OptimizerHook(Hook):
    def __init__(self, grad_clip=None):
        self.grad_clip = grad_clip

    def clip_grads(self, params):
        params = [p for p in params if p.requires_grad and p.grad is not None]
        if params:
            return clip_grad.clip_grad_norm_(params, **self.grad_clip)

    def after_train_iter(self, runner):
        runner.optimizer.zero_grad()
        runner.outputs["loss"].backward()
        if self.grad_clip is not None:
            norm = self.clip_grads(runner.model.parameters())
            if norm is not None:
                runner.log_buffer["grad_norm"] = float(norm)
        runner.optimizer.step()


class Fp16OptimizerHook(OptimizerHook):
    """The forward pass is decorated with autocast in the model; this hook does the rest."""

    def __init__(self, grad_clip=None, loss_scale=512.0):
        super().__init__(grad_clip)
        self._scale_update_param = None
        if loss_scale == "dynamic":
            self.loss_scaler = GradScaler()
        elif isinstance(loss_scale, float):
            self._scale_update_param = loss_scale
            self.loss_scaler = GradScaler(init_scale=loss_scale)
        elif isinstance(loss_scale, dict):
            self.loss_scaler = GradScaler(**loss_scale)
        else:
            raise ValueError(f"loss_scale must be a float, a dict or 'dynamic', got {loss_scale}")

    def before_run(self, runner):
        # a resumed runner carries the scaler's state in its meta dict
        if "fp16" in runner.meta and "loss_scaler" in runner.meta["fp16"]:
            self.loss_scaler.load_state_dict(runner.meta["fp16"]["loss_scaler"])

    def after_train_iter(self, runner):
        runner.model.zero_grad()
        runner.optimizer.zero_grad()
        self.loss_scaler.scale(runner.outputs["loss"]).backward()
        self.loss_scaler.unscale_(runner.optimizer)
        if self.grad_clip is not None:
            norm = self.clip_grads(runner.model.parameters())
            if norm is not None:
                runner.log_buffer["grad_norm"] = float(norm)
        self.loss_scaler.step(runner.optimizer)
        self.loss_scaler.update(self._scale_update_param)
        # checkpoint hooks write runner.meta
        runner.meta.setdefault("fp16", {})["loss_scaler"] = self.loss_scaler.state_dict()
