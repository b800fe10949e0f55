# why correct: the ascent direction is normalised so the loss scale cancels in it; weights are restored before the second, scaled gradient is unscaled, clipped and stepped once per update()
import torch
import torch.nn.functional as F
from torch import nn


class Perturbation:
    def __init__(self, params, rho=0.05):
        self.params, self.rho = list(params), rho
        self._moves = []

    @torch.no_grad()
    def climb(self):
        live = [p for p in self.params if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in live]))
        if not torch.isfinite(norm):
            return False
        self._moves = [(p, p.grad * (self.rho / (norm + 1e-12))) for p in live]
        for p, e in self._moves:
            p.add_(e)
        return True

    @torch.no_grad()
    def descend(self):
        for p, e in self._moves:
            p.sub_(e)
        self._moves = []


def set_bn_tracking(net, on):
    for m in net.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            if on and hasattr(m, "_kept"):
                m.momentum = m._kept
            elif not on:
                m._kept, m.momentum = m.momentum, 0.0


def train(net, loader, epochs=200, lr=0.1, rho=0.1, clip=5.0):
    net = net.cuda().train()
    opt = torch.optim.SGD(net.parameters(), lr, momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs)
    scaler = torch.amp.GradScaler("cuda")
    bump = Perturbation(net.parameters(), rho)

    def scaled_backward(img, label):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(net(img), label, label_smoothing=0.1)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        return loss.detach()

    for epoch in range(epochs):
        for img, label in loader:
            img, label = img.cuda(non_blocking=True), label.cuda(non_blocking=True)
            loss = scaled_backward(img, label)
            if bump.climb():
                set_bn_tracking(net, False)
                scaled_backward(img, label)
                set_bn_tracking(net, True)
                bump.descend()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), clip)
            scaler.step(opt)
            scaler.update()
        sched.step()
        print(epoch, loss.item(), scaler.get_scale())
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(),
                    "scaler": scaler.state_dict(), "epoch": epoch}, "sam.pt")
