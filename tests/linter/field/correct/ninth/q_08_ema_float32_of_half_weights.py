# why correct: weights live in float32 and only the computation is bfloat16; the EMA is float32 too, and sampling uses it under autocast
import copy

import torch
import torch.nn.functional as F
from torch import nn


class FloatEMA:
    def __init__(self, model, decay=0.9999):
        self.decay, self.n = decay, 0
        self.weights = {k: v.detach().clone().float() for k, v in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        self.n += 1
        d = min(self.decay, (1 + self.n) / (10 + self.n))
        for k, v in model.named_parameters():
            self.weights[k].lerp_(v.detach().float(), 1 - d)

    def state_dict(self):
        return {"n": self.n, "weights": self.weights}

    @torch.no_grad()
    def export(self, model):
        out = copy.deepcopy(model)
        for k, v in out.named_parameters():
            v.copy_(self.weights[k])
        return out.eval().requires_grad_(False)


def velocity_loss(model, x1, cond):
    x0 = torch.randn_like(x1)
    t = torch.rand(x1.shape[0], device=x1.device)
    xt = torch.lerp(x0, x1, t.view(-1, 1, 1, 1))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        v = model(xt, t, cond)
    return F.mse_loss(v.float(), x1 - x0)


@torch.inference_mode()
def sample(net, cond, shape, steps=50):
    x = torch.randn(shape, device="cuda", dtype=torch.float32)
    for i in range(steps):
        t = torch.full((shape[0],), i / steps, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            v = net(x, t, cond)
        x = x + v.float() / steps
    return x


def train(model: nn.Module, loader, steps, lr=1e-4):
    model = model.cuda().train()
    ema = FloatEMA(model)
    opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    done = 0
    while done < steps:
        for x1, cond in loader:
            loss = velocity_loss(model, x1.cuda(), cond.cuda())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            ema.update(model)
            done += 1
            if done == steps:
                break
    torch.save({"model": model.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict(), "step": done}, "flow.pt")
    return ema.export(model)
