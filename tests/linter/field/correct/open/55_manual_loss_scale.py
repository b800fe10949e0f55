# style of: openai/guided-diffusion:guided_diffusion/fp16_util.py
# torch: any
"""Mixed precision by hand: half weights in the network, float32 masters in the optimizer."""
import numpy as np
import torch
import torch.nn as nn

INITIAL_LOG_LOSS_SCALE = 20.0


def convert_module_to_f16(layer):
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        layer.weight.data = layer.weight.data.half()
        if layer.bias is not None:
            layer.bias.data = layer.bias.data.half()


def zero_grad(params):
    for p in params:
        p.grad = None


class MixedPrecisionTrainer:
    def __init__(self, model, use_fp16=False, fp16_scale_growth=1e-3):
        self.model = model
        self.use_fp16 = use_fp16
        self.fp16_scale_growth = fp16_scale_growth
        self.lg_loss_scale = INITIAL_LOG_LOSS_SCALE
        self.model_params = list(model.parameters())
        self.master_params = self.model_params
        if use_fp16:
            # masters are taken before the weights lose precision
            self.master_params = [nn.Parameter(p.detach().float().clone()) for p in self.model_params]
            model.apply(convert_module_to_f16)

    def backward(self, loss):
        if self.use_fp16:
            (loss * 2**self.lg_loss_scale).backward()
        else:
            loss.backward()

    def optimize(self, opt):
        return self._optimize_fp16(opt) if self.use_fp16 else self._optimize_normal(opt)

    def _grads_to_masters(self):
        for master, p in zip(self.master_params, self.model_params):
            master.grad = None if p.grad is None else p.grad.detach().float()

    def _masters_to_model(self):
        with torch.no_grad():
            for master, p in zip(self.master_params, self.model_params):
                p.copy_(master)

    def _norm(self, scale=1.0):
        total = 0.0
        for p in self.master_params:
            if p.grad is not None:
                total += torch.norm(p.grad, p=2, dtype=torch.float32).item() ** 2
        return np.sqrt(total) / scale

    def _optimize_fp16(self, opt):
        self._grads_to_masters()
        norm = self._norm(scale=2**self.lg_loss_scale)
        if not np.isfinite(norm):
            self.lg_loss_scale -= 1
            print(f"Found NaN, decreased lg_loss_scale to {self.lg_loss_scale}")
            zero_grad(self.model_params + self.master_params)
            return False
        for p in self.master_params:
            if p.grad is not None:
                p.grad.mul_(1.0 / (2**self.lg_loss_scale))
        opt.step()
        zero_grad(self.model_params + self.master_params)
        self._masters_to_model()
        self.lg_loss_scale += self.fp16_scale_growth
        return True

    def _optimize_normal(self, opt):
        opt.step()
        zero_grad(self.model_params)
        return True
