# source: https://github.com/pytorch/pytorch/issues/47906
# mistake: a custom autograd.Function used under autocast lacks custom_fwd/custom_bwd: forward multiplies in float16, backward runs without autocast and multiplies a float16 gradient with the saved float32 weight (dtype mismatch error)
# severity: error
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function


class ProjectSparse(Function):  # <- here
    """x @ (w * keep): gradient of w only on the kept entries."""

    @staticmethod
    def forward(ctx, x, w, keep):  # <- here
        masked = w * keep
        ctx.save_for_backward(x, masked, keep)
        return torch.matmul(x, masked)

    @staticmethod
    def backward(ctx, grad):  # <- here
        x, masked, keep = ctx.saved_tensors
        gx = torch.matmul(grad, masked.t())  # <- here
        gw = torch.matmul(x.flatten(0, -2).t(), grad.flatten(0, -2)) * keep  # <- here
        return gx, gw, None


class SparseLinear(nn.Module):
    def __init__(self, cin, cout, density=0.3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(cin, cout) / cin**0.5)
        self.bias = nn.Parameter(torch.zeros(cout))
        self.register_buffer("keep", (torch.rand(cin, cout) < density).float())

    def forward(self, x):
        return ProjectSparse.apply(x, self.weight, self.keep) + self.bias  # <- here


class Mixer(nn.Module):
    def __init__(self, tokens=196, dim=512):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.t1, self.t2 = nn.Linear(tokens, 256), nn.Linear(256, tokens)
        self.c1, self.c2 = SparseLinear(dim, 2048), SparseLinear(2048, dim)

    def forward(self, x):
        x = x + self.t2(F.gelu(self.t1(self.n1(x).transpose(1, 2)))).transpose(1, 2)
        return x + self.c2(F.gelu(self.c1(self.n2(x))))


class Net(nn.Module):
    def __init__(self, depth=8, classes=100, dim=512):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 16, 16)
        self.blocks = nn.Sequential(*[Mixer(dim=dim) for _ in range(depth)])
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(x).mean(1))


def fit(loader, epochs=100, lr=1e-3):
    net = Net().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, lr, epochs * len(loader))
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(epochs):
        for img, label in loader:
            img, label = img.cuda(non_blocking=True), label.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(net(img), label)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            sched.step()
    return net
