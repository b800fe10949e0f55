# source: https://github.com/openai/guided-diffusion/issues/44
# mistake: only the first of the two master parameter groups has its gradient divided by the loss scale, so the matrices are updated with gradients 2**lg_scale too large
# severity: error
import torch
import torch.nn as nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class Fp16Session:
    """Half-precision model, float32 masters in two flat tensors (gains and matrices), dynamic scale."""

    def __init__(self, model, lr, lg_scale=20.0, growth=1e-3):
        self.model = model.half()
        gains = [p for p in model.parameters() if p.ndim <= 1]
        mats = [p for p in model.parameters() if p.ndim > 1]
        self.groups = [gains, mats]
        self.masters = []
        for ps in self.groups:
            flat = _flatten_dense_tensors([p.detach().float() for p in ps])
            self.masters.append(nn.Parameter(flat))
        self.opt = torch.optim.AdamW(self.masters, lr=lr)
        self.lg_scale, self.growth = lg_scale, growth

    def zero(self):
        for p in self.model.parameters():
            p.grad = None

    def backward(self, loss):
        (loss * 2.0 ** self.lg_scale).backward()

    def _collect(self):
        for master, ps in zip(self.masters, self.groups):
            master.grad = _flatten_dense_tensors(
                [(p.grad if p.grad is not None else torch.zeros_like(p)).detach().float() for p in ps])

    def _publish(self):
        with torch.no_grad():
            for master, ps in zip(self.masters, self.groups):
                for p, src in zip(ps, _unflatten_dense_tensors(master.detach(), ps)):
                    p.copy_(src)

    def step(self):
        self._collect()
        if not all(torch.isfinite(m.grad).all() for m in self.masters):
            self.lg_scale -= 1
            return False
        self.masters[0].grad.mul_(1.0 / 2.0 ** self.lg_scale)  # <- here
        self.opt.step()  # <- here
        for m in self.masters:
            m.grad = None
        self._publish()
        self.lg_scale += self.growth
        return True


def q_sample(x0, t, bar):
    a = bar[t].view(-1, 1, 1, 1)
    eps = torch.randn_like(x0)
    return a.sqrt() * x0 + (1 - a).sqrt() * eps, eps


def train(model, loader, steps, lr=1e-4, timesteps=1000):
    sess = Fp16Session(model.cuda(), lr)
    betas = torch.linspace(1e-4, 0.02, timesteps, device="cuda")
    bar = torch.cumprod(1 - betas, dim=0)
    it, skipped = 0, 0
    while it < steps:
        for x0 in loader:
            x0 = x0.cuda()
            t = torch.randint(0, timesteps, (x0.shape[0],), device="cuda")
            xt, eps = q_sample(x0, t, bar)
            sess.zero()
            pred = sess.model(xt.half(), t)
            sess.backward((pred.float() - eps).pow(2).mean())
            skipped += not sess.step()
            it += 1
            if it % 500 == 0:
                print(it, "scale 2^%.1f" % sess.lg_scale, "skipped", skipped)
            if it >= steps:
                break
