"""
# source: https://github.com/pytorch/benchmark/pull/873
# mistake: the whole training step, backward and optimizer step included, runs under autocast; autocast belongs around the forward pass and the loss only.
# severity: warning
# torch: any
"""
from contextlib import nullcontext

import torch
import torch.nn as nn
import torch.nn.functional as F

from unet import UNet


def dice_loss(pred, target, eps=1.0):
    inter = (pred * target).sum(dim=(-1, -2))
    total = pred.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
    return 1 - ((2 * inter + eps) / (total + eps)).mean()


class Model:
    DEFAULT_TRAIN_BSIZE = 1
    DEFAULT_EVAL_BSIZE = 1

    def __init__(self, test, device="cuda", amp=True, batch_size=None):
        self.device = device
        self.amp = amp
        size = batch_size or (self.DEFAULT_TRAIN_BSIZE if test == "train" else self.DEFAULT_EVAL_BSIZE)
        self.model = UNet(n_channels=3, n_classes=2, bilinear=True).to(device)
        self.sample_inputs = torch.rand((size, 3, 640, 959), device=device)
        self.sample_masks = torch.randint(0, 2, (size, 640, 959), device=device)
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.9)
        self.grad_scaler = torch.cuda.amp.GradScaler(enabled=amp)
        self.criterion = nn.CrossEntropyLoss()

    def amp_context(self):
        return torch.cuda.amp.autocast() if self.amp else nullcontext()

    def _train_step(self):
        self.optimizer.zero_grad(set_to_none=True)
        masks_pred = self.model(self.sample_inputs)
        one_hot = F.one_hot(self.sample_masks, 2).permute(0, 3, 1, 2).float()
        loss = self.criterion(masks_pred, self.sample_masks)
        loss = loss + dice_loss(F.softmax(masks_pred, dim=1).float(), one_hot)
        self.grad_scaler.scale(loss).backward()  # <- here
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        return loss

    def train(self, niter=1):
        self.model.train()
        for _ in range(niter):
            with self.amp_context():  # <- here
                loss = self._train_step()
        return loss.detach()

    @torch.no_grad()
    def eval(self, niter=1):
        self.model.eval()
        for _ in range(niter):
            with self.amp_context():
                mask = self.model(self.sample_inputs)
        return mask.argmax(dim=1)


if __name__ == "__main__":
    bench = Model("train", batch_size=4)
    for i in range(20):
        print(i, bench.train(niter=5).item())
