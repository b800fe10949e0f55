# source: https://github.com/suvojit-0x55aa/mixed-precision-pytorch/issues/1
# mistake: the fp32 master gradients are clipped before they are divided by the static loss scale, so the limit of 5 really is 5/1024
# severity: error
import torch
import torch.nn.functional as F
from torch import nn

LOSS_SCALE = 1024.0


def to_half_keep_bn(net):
    for m in net.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.float()
        else:
            for p in m.parameters(recurse=False):
                p.data = p.data.half()
    return net


class HalfPrecisionTrainer:
    def __init__(self, net, lr=0.1, clip=5.0):
        self.net = to_half_keep_bn(net.cuda())
        self.model_params = [p for p in self.net.parameters() if p.requires_grad]
        self.master_params = [p.detach().clone().float().requires_grad_(True) for p in self.model_params]
        self.optimizer = torch.optim.SGD(self.master_params, lr=lr, momentum=0.9, weight_decay=5e-4)
        self.clip = clip

    def _grads_to_master(self):
        for master, p in zip(self.master_params, self.model_params):
            master.grad = None if p.grad is None else p.grad.detach().float()

    def _divide_by_scale(self):
        for master in self.master_params:
            if master.grad is not None:
                master.grad.div_(LOSS_SCALE)

    @torch.no_grad()
    def _master_to_model(self):
        for master, p in zip(self.master_params, self.model_params):
            p.copy_(master)

    def _finite(self):
        return all(torch.isfinite(m.grad).all() for m in self.master_params if m.grad is not None)

    def train_batch(self, images, labels):
        self.net.zero_grad(set_to_none=True)
        logits = self.net(images.cuda().half())
        loss = F.cross_entropy(logits.float(), labels.cuda())
        (loss * LOSS_SCALE).backward()
        self._grads_to_master()
        if not self._finite():
            return loss.item()
        nn.utils.clip_grad_norm_(self.master_params, self.clip)  # <- here
        self._divide_by_scale()  # <- here
        self.optimizer.step()
        self._master_to_model()
        return loss.item()

    def train(self, loader, epochs):
        for epoch in range(epochs):
            self.net.train()
            total = 0.0
            for images, labels in loader:
                total += self.train_batch(images, labels)
            print(f"epoch {epoch} loss {total / len(loader):.4f}")
