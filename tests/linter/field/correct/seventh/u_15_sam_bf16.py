# why correct: sharpness-aware minimisation needs two backward passes at unscaled gradients; under bfloat16 autocast there is no loss scale in the way
import torch
from torch import nn


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_cls, rho=0.05, **kw):
        super().__init__(params, dict(rho=rho, **kw))
        self.base = base_cls(self.param_groups, **kw)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def ascend(self):
        norm = torch.norm(
            torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None])
        )
        for g in self.param_groups:
            scale = g["rho"] / (norm + 1e-12)
            for p in g["params"]:
                if p.grad is None:
                    continue
                e = p.grad * scale
                p.add_(e)
                self.state[p]["e"] = e

    @torch.no_grad()
    def descend(self):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.sub_(self.state[p]["e"])
        self.base.step()


class BirdsongTrainer:
    def __init__(self, net, classes, lr=0.05):
        self.net = net.cuda()
        self.opt = SAM(self.net.parameters(), torch.optim.SGD, rho=0.05, lr=lr, momentum=0.9, weight_decay=5e-4)
        self.loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)

    def _pass(self, spec, label):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.loss_fn(self.net(spec), label)
        loss.backward()
        return loss.detach()

    def _clear(self):
        for p in self.net.parameters():
            p.grad = None

    def train_batch(self, spec, label):
        self._clear()
        loss = self._pass(spec, label)
        self.opt.ascend()
        self._clear()
        self._pass(spec, label)
        self.opt.descend()
        return loss.item()

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            self.net.train()
            total = sum(self.train_batch(s.cuda(), y.cuda()) for s, y in loader)
            print(f"epoch {epoch}: {total / len(loader):.4f}")
