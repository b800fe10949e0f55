# style of: state-spaces/mamba:mamba_ssm/ops/selective_scan_interface.py
# torch: 2.4+
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd


class DecayScan(torch.autograd.Function):
    """h[t] = a[t] * h[t-1] + u[t], kept in float32 under autocast."""

    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, a, u):
        states = []
        h = torch.zeros_like(u[:, 0])
        for t in range(u.size(1)):
            h = a[:, t] * h + u[:, t]
            states.append(h)
        out = torch.stack(states, dim=1)
        ctx.save_for_backward(a, out)
        return out

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, grad_out):
        a, out = ctx.saved_tensors
        grad_a = torch.zeros_like(a)
        grad_u = torch.zeros_like(out)
        carry = torch.zeros_like(out[:, 0])
        for t in range(out.size(1) - 1, -1, -1):
            carry = carry + grad_out[:, t]
            grad_u[:, t] = carry
            if t > 0:
                grad_a[:, t] = carry * out[:, t - 1]
            carry = carry * a[:, t]
        return grad_a, grad_u


class HalfMatmul(torch.autograd.Function):
    """No cast_inputs: the products run in whatever type autocast is set to, forward and backward."""

    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.mm(w)

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad.mm(w.t()), x.t().mm(grad)


class ScanBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, width)
        self.inp = nn.Linear(width, width)
        self.out = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x):
        y = self.norm(x)
        h = DecayScan.apply(torch.sigmoid(self.gate(y)), self.inp(y))
        flat = HalfMatmul.apply(h.reshape(-1, h.size(-1)), self.out)
        return x + flat.view_as(x)


if __name__ == "__main__":
    block = ScanBlock(64).cuda()
    opt = torch.optim.AdamW(block.parameters(), lr=1e-3)
    for _ in range(10):
        x = torch.randn(8, 32, 64, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = block(x).float().pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
