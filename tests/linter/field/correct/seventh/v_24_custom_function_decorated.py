# why correct: the custom Function declares custom_fwd with float32 inputs and custom_bwd, so forward and backward both run in float32 under autocast
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd


class LogDet(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, cov):
        chol = torch.linalg.cholesky(cov)
        ctx.save_for_backward(chol)
        return 2 * chol.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        (chol,) = ctx.saved_tensors
        return grad[..., None, None] * torch.cholesky_inverse(chol)


def covariance(z, ridge=1e-2):
    z = z.float()
    z = z - z.mean(0)
    eye = torch.eye(z.size(1), device=z.device)
    return z.t() @ z / (len(z) - 1) + ridge * eye


class SelfSup(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.back = nn.Sequential(
            nn.Conv2d(3, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Conv2d(64, 256, 3, 2, 1), nn.BatchNorm2d(256), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )
        self.proj = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, dim))

    def forward(self, x):
        return self.proj(self.back(x))


def objective(a, b, weight=0.1):
    with torch.autocast("cuda", enabled=False):
        pull = (a.float() - b.float()).square().sum(1).mean()
        ca, cb = covariance(a), covariance(b)
    spread = LogDet.apply(ca) + LogDet.apply(cb)
    return pull - weight * spread


def main(views, epochs=100):
    net = SelfSup().cuda()
    opt = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for e in range(epochs):
        for v1, v2 in views:
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                a, b = net(v1.cuda()), net(v2.cuda())
                loss = objective(a, b)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 3.0)
            scaler.step(opt)
            scaler.update()
        print(e, loss.item())
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "scaler": scaler.state_dict()}, f"ssl{e}.pt")


if __name__ == "__main__":
    from views import two_views

    main(two_views(512))
