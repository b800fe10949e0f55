"""
# source: https://github.com/NVlabs/pacnet/issues/27
# mistake: the forward keeps autocast's casts but backward is not decorated with custom_bwd, so it runs without autocast and multiplies a float16 gradient with a float32 weight, which raises RuntimeError.
# severity: error
# torch: any
"""
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import custom_fwd
from torch.autograd import Function


class PacConv2dFn(Function):
    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(ctx, cols, kernel, weight):
        # cols: B x C x K x L, kernel: B x K x L, weight: O x C x K
        ctx.save_for_backward(cols, kernel, weight)
        return torch.einsum("bckl,ock->bol", cols * kernel.unsqueeze(1), weight)

    @staticmethod
    def backward(ctx, grad_output):
        cols, kernel, weight = ctx.saved_tensors
        grad_mul = torch.einsum("bol,ock->bckl", grad_output, weight)  # <- here
        grad_cols = grad_mul * kernel.unsqueeze(1)
        grad_kernel = (grad_mul * cols).sum(1)
        grad_weight = torch.einsum("bol,bckl->ock", grad_output, (cols * kernel.unsqueeze(1)).to(grad_output.dtype))
        return grad_cols, grad_kernel, grad_weight


class PacConv2d(nn.Module):
    def __init__(self, cin, cout, k=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(cout, cin, k * k) * 0.05)
        self.k = k

    def forward(self, x, guide):
        b, _, h, w = x.shape
        pad = self.k // 2
        cols = F.unfold(x, self.k, padding=pad).view(b, x.shape[1], self.k**2, h * w)
        g = F.unfold(guide, self.k, padding=pad).view(b, guide.shape[1], self.k**2, h * w)
        centre = guide.flatten(2).unsqueeze(2)
        kernel = torch.exp(-0.5 * (g - centre).float().pow(2).sum(1))
        return PacConv2dFn.apply(cols, kernel, self.weight).view(b, -1, h, w)


class GuidedUpsampler(nn.Module):
    def __init__(self, classes=21):
        super().__init__()
        self.guide = nn.Conv2d(3, 16, 3, padding=1)
        self.pac1, self.pac2 = PacConv2d(classes, 64), PacConv2d(64, classes)

    def forward(self, coarse, image):
        guide = self.guide(image)
        return self.pac2(torch.relu(self.pac1(coarse, guide)), guide)


def train(model, loader):
    model = model.cuda().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for coarse, image, label in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(coarse.cuda(), image.cuda()), label.cuda(), ignore_index=255)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
