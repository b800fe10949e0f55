# source: https://github.com/pytorch/pytorch/issues/46178
# mistake: a custom autograd.Function without custom_fwd/custom_bwd runs its forward under autocast and its backward without, so float16 gradients meet float32 saved tensors and the backward raises.
# severity: error
# torch: any
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Function


class LeakyProjectFunction(Function):
    @staticmethod
    def forward(ctx, x, weight, slope):  # <- here
        y = x.mm(weight.t())
        positive = y > 0
        ctx.save_for_backward(x, weight, positive)
        ctx.slope = slope
        return torch.where(positive, y, slope * y)

    @staticmethod
    def backward(ctx, grad_out):  # <- here
        x, weight, positive = ctx.saved_tensors
        grad_y = torch.where(positive, grad_out, ctx.slope * grad_out)
        return grad_y.mm(weight), grad_y.t().mm(x), None


class LeakyProject(nn.Module):
    def __init__(self, d_in, d_out, slope=0.1):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_out, d_in) * d_in**-0.5)
        self.slope = slope

    def forward(self, x):
        return LeakyProjectFunction.apply(x, self.weight, self.slope)


def main(epochs=5):
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(32), LeakyProject(32, 64), nn.Linear(64, 4)).cuda()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    x, y = torch.randn(4096, 32), torch.randint(0, 4, (4096,))
    for epoch in range(epochs):
        for xb, yb in zip(x.split(128), y.split(128)):
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(net(xb.cuda()), yb.cuda())
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
