# style of: https://docs.pytorch.org/docs/stable/_sources/notes/amp_examples.rst.txt (gradient penalty)
# torch: 2.3+
import torch
from torch import nn
import torch.nn.functional as F

model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")


def penalised_step(x, y, weight=0.1):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        fit = F.mse_loss(model(x), y)

    # the double-backward pass also needs scaled values, or it may underflow
    scaled_grads = torch.autograd.grad(
        outputs=scaler.scale(fit), inputs=tuple(model.parameters()), create_graph=True
    )

    # these gradients belong to no optimizer, so unscale_ cannot be used: divide by hand
    inv_scale = 1.0 / scaler.get_scale()
    grads = [g * inv_scale for g in scaled_grads]

    with torch.autocast("cuda", dtype=torch.float16):
        norm_sq = 0
        for g in grads:
            norm_sq = norm_sq + g.pow(2).sum()
        total = fit + weight * norm_sq.sqrt()

    scaler.scale(total).backward()
    scaler.step(opt)
    scaler.update()
    return fit.detach()


if __name__ == "__main__":
    for i in range(100):
        x = torch.randn(128, 32, device="cuda")
        y = x.sum(dim=1, keepdim=True)
        value = penalised_step(x, y)
        if i % 20 == 0:
            print(i, value.item())
