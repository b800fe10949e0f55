# source: https://github.com/pytorch/pytorch/issues/38487
# mistake: a custom autograd Function runs its forward under autocast but has no custom_fwd/custom_bwd, so its backward multiplies a float16 gradient with float32 saved tensors and raises
# severity: error
import torch
from torch import nn
from torch.amp import GradScaler, autocast


class SharedFactorProduct(torch.autograd.Function):
    """y = x A B, keeping only x and the two factors for the backward pass."""

    @staticmethod
    def forward(ctx, x, a, b):  # <- here
        ctx.save_for_backward(x, a, b)
        return torch.mm(torch.mm(x, a), b)

    @staticmethod
    def backward(ctx, grad_out):  # <- here
        x, a, b = ctx.saved_tensors
        grad_h = torch.mm(grad_out, b.t())  # <- here
        grad_x = torch.mm(grad_h, a.t())
        grad_a = torch.mm(x.t(), grad_h)
        grad_b = torch.mm(torch.mm(x, a).t(), grad_out)
        return grad_x, grad_a, grad_b


class LowRank(nn.Module):
    def __init__(self, d_in, d_out, rank):
        super().__init__()
        self.a = nn.Parameter(torch.randn(d_in, rank) / d_in ** 0.5)
        self.b = nn.Parameter(torch.randn(rank, d_out) / rank ** 0.5)

    def forward(self, x):
        return SharedFactorProduct.apply(x, self.a, self.b)


class RatingModel(nn.Module):
    def __init__(self, n_features, rank=32):
        super().__init__()
        self.norm = nn.LayerNorm(n_features)
        self.compress = LowRank(n_features, 256, rank)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(256, 1))

    def forward(self, x):
        return self.head(self.compress(self.norm(x))).squeeze(-1)


def fit(loader, n_features, epochs=3, device="cuda"):
    net = RatingModel(n_features).to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = GradScaler("cuda")
    for epoch in range(epochs):
        seen, total = 0, 0.0
        for features, rating in loader:
            features, rating = features.to(device), rating.to(device)
            opt.zero_grad(set_to_none=True)
            with autocast("cuda", dtype=torch.float16):
                pred = net(features)
                loss = nn.functional.mse_loss(pred.float(), rating)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            total += loss.item() * rating.numel()
            seen += rating.numel()
        print(f"epoch {epoch}: mse {total / seen:.4f}")
    return net
