# why correct: a hand-written dynamic scale over float32 masters: all gradients are checked, then all are divided by the scale used for the backward, then clipped
import torch
import torch.nn as nn
import torch.nn.functional as F


class Scale:
    def __init__(self, value=2.0 ** 15, window=1000):
        self.value, self.window, self.good = value, window, 0

    def overflow(self):
        self.value, self.good = max(1.0, self.value / 2), 0

    def fine(self):
        self.good += 1
        if self.good % self.window == 0:
            self.value = min(2.0 ** 24, self.value * 2)


def make_masters(model):
    masters = [p.detach().float().clone().requires_grad_(True) for p in model.parameters()]
    model.half()
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.float()
    return list(model.parameters()), masters


@torch.no_grad()
def grads_to_masters(params, masters):
    for p, m in zip(params, masters):
        m.grad = None if p.grad is None else p.grad.detach().float()


@torch.no_grad()
def masters_to_params(params, masters):
    for p, m in zip(params, masters):
        p.copy_(m)


def train(model, loader, epochs, lr=0.1, clip=2.0):
    model.cuda().train()
    params, masters = make_masters(model)
    opt = torch.optim.SGD(masters, lr=lr, momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [epochs // 2, 3 * epochs // 4])
    scale = Scale()
    skipped = 0
    for epoch in range(epochs):
        for x, y in loader:
            logits = model(x.cuda(non_blocking=True).half())
            loss = F.cross_entropy(logits.float(), y.cuda(non_blocking=True))
            for p in params:
                p.grad = None
            (loss * scale.value).backward()
            grads_to_masters(params, masters)
            found = [m.grad for m in masters if m.grad is not None]
            if not all(bool(torch.isfinite(g).all()) for g in found):
                scale.overflow()
                skipped += 1
                continue
            torch._foreach_mul_(found, 1.0 / scale.value)
            nn.utils.clip_grad_norm_(masters, clip)
            opt.step()
            masters_to_params(params, masters)
            scale.fine()
        sched.step()
        print(epoch, loss.item(), "scale", scale.value, "skipped", skipped)
    torch.save({"masters": masters, "opt": opt.state_dict(), "sched": sched.state_dict(), "scale": vars(scale),
                "buffers": dict(model.named_buffers())}, "final.pt")
