# why correct: the wrapper unscales inside apply() before the adaptive unit-wise clipping touches any gradient, and unscale_ is called exactly once per step
import torch
import torch.nn as nn


def unit_norm(t):
    if t.ndim <= 1:
        return t.norm()
    return t.flatten(1).norm(dim=1).view(-1, *[1] * (t.ndim - 1))


@torch.no_grad()
def adaptive_clip(params, factor=0.02, floor=1e-3):
    for p in params:
        if p.grad is None:
            continue
        limit = unit_norm(p).clamp(min=floor) * factor
        size = unit_norm(p.grad).clamp(min=1e-6)
        p.grad.mul_(torch.where(size > limit, limit / size, torch.ones_like(size)))


class LossStepper:
    """Callable that turns a loss into an optimizer step."""

    def __init__(self, optimizer, model, clip=None, half=True):
        self.optimizer, self.model, self.clip = optimizer, model, clip
        self._s = torch.cuda.amp.GradScaler(enabled=half)

    def state_dict(self):
        return self._s.state_dict()

    def load_state_dict(self, d):
        self._s.load_state_dict(d)

    def __call__(self, loss):
        self.optimizer.zero_grad(set_to_none=True)
        self._s.scale(loss).backward()
        self.apply()

    def apply(self):
        if self.clip is not None:
            self._s.unscale_(self.optimizer)
            adaptive_clip(self.model.parameters(), self.clip)
        self._s.step(self.optimizer)
        self._s.update()


class NormFree(nn.Module):
    def __init__(self, classes=100):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, 2, 1)
        self.blocks = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(8))
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = x + 0.2 * b(nn.functional.gelu(x))
        return self.fc(x.mean((2, 3)))


def main(loader, val, epochs=90):
    model = NormFree().cuda()
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=2e-5)
    stepper = LossStepper(opt, model, clip=0.02)
    for e in range(epochs):
        for x, y in loader:
            with torch.cuda.amp.autocast():
                loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            stepper(loss)
        torch.save({"m": model.state_dict(), "o": opt.state_dict(), "s": stepper.state_dict(), "e": e}, "nf.pt")


if __name__ == "__main__":
    from images import loaders

    main(*loaders())
