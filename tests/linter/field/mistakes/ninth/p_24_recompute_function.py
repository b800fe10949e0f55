# source: CompVis/stable-diffusion#281
# mistake: a hand-written recomputation Function reruns the forward in backward without restoring autocast, so the recomputed activations have another dtype than the forward's
# severity: error
import torch
import torch.nn as nn
import torch.nn.functional as F


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, n_inputs, *args):  # <- here
        ctx.fn = fn
        ctx.inputs = list(args[:n_inputs])
        ctx.params = list(args[n_inputs:])
        with torch.no_grad():
            return fn(*ctx.inputs)

    @staticmethod
    def backward(ctx, grad_out):  # <- here
        inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            out = ctx.fn(*[x.view_as(x) for x in inputs])  # <- here
        grads = torch.autograd.grad(out, inputs + ctx.params, grad_out, allow_unused=True)  # <- here
        del ctx.inputs, ctx.params
        return (None, None) + grads


def recompute(module, *inputs):
    params = tuple(p for p in module.parameters() if p.requires_grad)
    return Recompute.apply(module, len(inputs), *(inputs + params))


class ResBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n1 = nn.GroupNorm(8, c)
        self.c1 = nn.Conv2d(c, c, 3, padding=1)
        self.n2 = nn.GroupNorm(8, c)
        self.c2 = nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x):
        h = self.c1(F.silu(self.n1(x)))
        return x + self.c2(F.silu(self.n2(h)))


class Denoiser(nn.Module):
    def __init__(self, c=128, depth=8):
        super().__init__()
        self.inp = nn.Conv2d(4, c, 3, padding=1)
        self.blocks = nn.ModuleList(ResBlock(c) for _ in range(depth))
        self.out = nn.Conv2d(c, 4, 3, padding=1)

    def forward(self, z):
        h = self.inp(z)
        for b in self.blocks:
            h = recompute(b, h) if self.training else b(h)
        return self.out(h)


def train(loader, steps, device="cuda"):
    net = Denoiser().to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    net.train()
    for step, z in zip(range(steps), loader):
        z = z.to(device)
        noise = torch.randn_like(z)
        level = torch.rand(z.size(0), 1, 1, 1, device=device)
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            pred = net((1 - level) * z + level * noise)
        loss = F.mse_loss(pred.float(), noise)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 100 == 0:
            print(step, loss.item())
