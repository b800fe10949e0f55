# why correct: custom_fwd(cast_inputs=float32) runs the operation in float32 with autocast off, and custom_bwd is paired with it
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd


class SelectiveScan(torch.autograd.Function):
    """h_t = a_t * h_{t-1} + x_t along dim 1."""

    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, a, x):
        h = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            h = a[:, t] * h + x[:, t]
            out.append(h)
        y = torch.stack(out, 1)
        ctx.save_for_backward(a, y)
        return y

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, gy):
        a, y = ctx.saved_tensors
        g = torch.zeros_like(gy[:, 0])
        ga, gx = torch.empty_like(a), torch.empty_like(gy)
        for t in range(gy.shape[1] - 1, -1, -1):
            g = gy[:, t] + g
            gx[:, t] = g
            ga[:, t] = g * y[:, t - 1] if t > 0 else 0.0
            g = g * a[:, t]
        return ga, gx


class GatedScan(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.inp, self.gate, self.out = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        h = self.norm(x)
        a = torch.sigmoid(self.gate(h).float() + 2.0)
        y = SelectiveScan.apply(a, (1 - a) * self.inp(h))
        return x + self.out(y)


class Denoiser(nn.Module):
    def __init__(self, d=192, depth=4):
        super().__init__()
        self.enc, self.dec = nn.Conv1d(1, d, 16, 8, 4), nn.ConvTranspose1d(d, 1, 16, 8, 4)
        self.mid = nn.Sequential(*[GatedScan(d) for _ in range(depth)])

    def forward(self, wav):
        z = self.enc(wav)
        return self.dec(self.mid(z.transpose(1, 2)).transpose(1, 2))


def si_sdr(est, ref, eps=1e-8):
    est, ref = est.float().squeeze(1), ref.float().squeeze(1)
    est, ref = est - est.mean(-1, keepdim=True), ref - ref.mean(-1, keepdim=True)
    proj = (est * ref).sum(-1, keepdim=True) / (ref.square().sum(-1, keepdim=True) + eps) * ref
    return 10 * torch.log10(proj.square().sum(-1) / ((est - proj).square().sum(-1) + eps) + eps)


net = Denoiser().cuda()
opt = torch.optim.AdamW(net.parameters(), 5e-4)
scaler = torch.amp.GradScaler("cuda", init_scale=4096.0)


def one_step(noisy, clean):
    with torch.autocast("cuda", dtype=torch.float16):
        est = net(noisy.cuda())
    loss = -si_sdr(est, clean.cuda()).mean()
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    scaler.step(opt)
    scaler.update()
    return loss.item()


if __name__ == "__main__":
    from dns import pairs

    for i, pair in enumerate(pairs(batch=32)):
        value = one_step(*pair)
        if i % 200 == 0:
            print(i, value)
