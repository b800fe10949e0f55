# why correct: loss scaling by hand: multiply, divide the float32 gradients by the same factor, skip and halve on overflow, double after a run of good steps
import torch
from torch import nn


class HandScale:
    def __init__(self, start=2.0**15, window=1000, top=2.0**24):
        self.value, self.window, self.top, self.good = start, window, top, 0

    def unscale(self, params):
        inv = 1.0 / self.value
        grads = [p.grad for p in params if p.grad is not None]
        torch._foreach_mul_(grads, inv)
        return bool(torch.stack([g.isfinite().all() for g in grads]).all())

    def adapt(self, ok):
        if ok:
            self.good += 1
            if self.good >= self.window:
                self.value, self.good = min(self.value * 2, self.top), 0
        else:
            self.value, self.good = max(self.value / 2, 1.0), 0


class NeuralField(nn.Module):
    def __init__(self, width=256, depth=6, bands=10):
        super().__init__()
        self.register_buffer("freq", 2.0 ** torch.arange(bands))
        dims = [3 + 6 * bands] + [width] * depth
        self.body = nn.Sequential(*[m for i, o in zip(dims, dims[1:]) for m in (nn.Linear(i, o), nn.ReLU())])
        self.head = nn.Linear(width, 4)

    def forward(self, xyz):
        a = (xyz[..., None] * self.freq).flatten(-2)
        return self.head(self.body(torch.cat([xyz, a.sin(), a.cos()], -1)))


def composite(raw, dt):
    rgb, sigma = raw[..., :3].float().sigmoid(), nn.functional.softplus(raw[..., 3].float())
    alpha = 1 - torch.exp(-sigma * dt)
    trans = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
    return ((alpha * trans)[..., None] * rgb).sum(1)


def main(rays, steps=200_000, samples=96, near=2.0, far=6.0):
    field = NeuralField().cuda()
    params = list(field.parameters())
    opt = torch.optim.Adam(params, 5e-4)
    scale = HandScale()
    skipped = 0
    for it in range(steps):
        o, d, gt = (t.cuda() for t in rays.sample(4096))
        t = torch.linspace(near, far, samples, device="cuda")
        t = t + torch.rand(len(o), samples, device="cuda") * (far - near) / samples
        pts = o[:, None] + d[:, None] * t[..., None]
        dt = torch.diff(t, dim=1, append=t[:, -1:] + (far - near) / samples)
        with torch.autocast("cuda", dtype=torch.float16):
            raw = field(pts)
        loss = (composite(raw, dt) - gt).square().mean()
        opt.zero_grad(set_to_none=True)
        (loss * scale.value).backward()
        ok = scale.unscale(params)
        if ok:
            nn.utils.clip_grad_norm_(params, 1.0)
            opt.step()
        else:
            skipped += 1
        scale.adapt(ok)
        if it % 1000 == 0:
            print(it, "psnr", (-10 * loss.detach().log10()).item(), "scale", scale.value, "skipped", skipped)
    torch.save(field.state_dict(), "field.pt")
