# why correct: each of the two forwards of the sharpness-aware step opens its own bfloat16 autocast, so weights perturbed in between are recast; no scaler is needed, totals are float32/python numbers
import torch
from torch import nn
from torch.nn import functional as F


class Sharp(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kw):
        super().__init__(params, dict(rho=rho, **kw))
        self.base = base(self.param_groups, **kw)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            first = closure()
        ps = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        rho = self.param_groups[0]["rho"]
        norm = torch.stack([p.grad.norm() for p in ps]).norm()
        push = rho / (norm + 1e-12)
        deltas = [p.grad * push for p in ps]
        torch._foreach_add_(ps, deltas)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(ps, deltas)
        self.base.step()
        return first


class Wide(nn.Module):
    def __init__(self, classes=100):
        super().__init__()
        ch = [3, 64, 160, 320]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in zip(ch, ch[1:]))
        self.norms = nn.ModuleList(nn.GroupNorm(8, b) for b in ch[1:])
        self.fc = nn.Linear(320, classes)

    def forward(self, x):
        for c, n in zip(self.convs, self.norms):
            x = F.silu(n(c(x)))
        return self.fc(x.mean((2, 3)))


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    right, seen, nll = 0, 0, 0.0
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = net(x.cuda())
        out, y = out.float(), y.cuda()
        right += (out.argmax(1) == y).sum().item()
        nll += F.cross_entropy(out, y, reduction="sum").item()
        seen += len(y)
    net.train()
    return right / seen, nll / seen


def main(train, test, epochs=200):
    net = Wide().cuda()
    opt = Sharp(net.parameters(), torch.optim.SGD, rho=0.1, lr=0.1, momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt.base, epochs)
    for e in range(epochs):
        for x, y in train:
            x, y = x.cuda(), y.cuda()

            def closure():
                opt.zero_grad()
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = F.cross_entropy(net(x), y, label_smoothing=0.1)
                loss.backward()
                return loss.detach()

            opt.step(closure)
        sched.step()
        print(e, *evaluate(net, test))


if __name__ == "__main__":
    from cifar import loaders

    main(*loaders(128))
