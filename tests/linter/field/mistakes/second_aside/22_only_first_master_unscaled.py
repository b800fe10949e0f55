"""
# source: https://github.com/openai/guided-diffusion/issues/44
# mistake: only the first master parameter's gradient is divided by the loss scale before the step; all the others reach the optimizer multiplied by it.
# severity: error
# torch: any
"""
import numpy as np
import torch
from torch import nn

from script_util import create_model_and_diffusion
from train_data import load_data


class HalfTrainer:
    """Half weights in the model, float32 masters (scalars and matrices) in the optimizer, manual loss scale."""

    def __init__(self, model, lr=1e-4, scale_growth=1e-3):
        self.model = model.cuda().half()
        self.model_params = [p for p in model.parameters() if p.requires_grad]
        self.scalars = [p for p in self.model_params if p.ndim <= 1]
        self.matrices = [p for p in self.model_params if p.ndim > 1]
        self.groups = [self.scalars, self.matrices]
        self.master_params = [
            nn.Parameter(torch.cat([p.detach().float().flatten() for p in group])) for group in self.groups
        ]
        self.opt = torch.optim.AdamW(self.master_params, lr=lr)
        self.lg_loss_scale = 20.0
        self.scale_growth = scale_growth

    def backward(self, loss):
        (loss.float() * 2**self.lg_loss_scale).backward()

    def _grads_to_masters(self):
        for master, group in zip(self.master_params, self.groups):
            master.grad = torch.cat([p.grad.detach().float().flatten() for p in group])

    def _masters_to_model(self):
        with torch.no_grad():
            for master, group in zip(self.master_params, self.groups):
                chunks = master.split([p.numel() for p in group])
                for p, chunk in zip(group, chunks):
                    p.copy_(chunk.view_as(p))

    def optimize(self):
        if any(p.grad is not None and not torch.isfinite(p.grad).all() for p in self.model_params):
            self.lg_loss_scale -= 1
            self.zero_grad()
            return False
        self._grads_to_masters()
        self.master_params[0].grad.mul_(1.0 / 2**self.lg_loss_scale)  # <- here
        self.opt.step()
        self._masters_to_model()
        self.zero_grad()
        self.lg_loss_scale += self.scale_growth
        return True

    def zero_grad(self):
        for p in self.model_params:
            p.grad = None


if __name__ == "__main__":
    model, diffusion = create_model_and_diffusion(image_size=64)
    trainer = HalfTrainer(model)
    for step, images in enumerate(load_data("imagenet64", batch_size=32)):
        t = torch.randint(0, diffusion.num_timesteps, (images.shape[0],), device="cuda")
        losses = diffusion.training_losses(model, images.cuda().half(), t)
        trainer.backward(losses["loss"].float().mean())
        trainer.optimize()
        if step % 100 == 0:
            print(step, np.round(trainer.lg_loss_scale, 2), losses["loss"].float().mean().item())
