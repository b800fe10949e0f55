import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import custom_bwd, custom_fwd
from torch.utils.data import DataLoader, TensorDataset


class ClampedExp(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        y = torch.exp(x.clamp(max=15))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        y, = ctx.saved_tensors
        return grad * y


class DensityHead(nn.Module):
    def __init__(self, d_in, k=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d_in, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU())
        self.out = nn.Linear(256, 3 * k)

    def forward(self, x):
        h = self.out(self.body(x))
        with torch.autocast("cuda", enabled=False):
            logit, mu, log_sigma = h.float().chunk(3, -1)
            inv_sigma = ClampedExp.apply(-log_sigma)
            return logit, mu, inv_sigma


def nll(logit, mu, inv_sigma, y):
    z = (y[:, None] - mu) * inv_sigma
    comp = F.log_softmax(logit, -1) - 0.5 * z.pow(2) + torch.log(inv_sigma + 1e-8)
    return -torch.logsumexp(comp, -1).mean()


class Trainer:
    def __init__(self, model, lr, max_norm):
        self.model = model.cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda", growth_interval=500)
        self.max_norm = max_norm
        self.skipped = 0

    def forward(self, x, y):
        with torch.autocast("cuda", dtype=torch.float16):
            params = self.model(x)
        return nll(*params, y)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def optimizer_step(self):
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped += int(self.scaler.get_scale() < before)
        self.optimizer.zero_grad()
        return norm


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="energy.pt")
    parser.add_argument("--epochs", type=int, default=50)
    args = parser.parse_args()
    x, y = torch.load(args.data)
    loader = DataLoader(TensorDataset(x.float(), y.float()), 512, shuffle=True, drop_last=True)
    trainer = Trainer(DensityHead(x.size(1)), lr=1e-3, max_norm=2.0)
    for epoch in range(args.epochs):
        for xb, yb in loader:
            loss = trainer.forward(xb.cuda(), yb.cuda())
            trainer.backward(loss)
            trainer.optimizer_step()
        print(f"epoch {epoch} nll {loss.item():.4f} skipped {trainer.skipped}")


if __name__ == "__main__":
    main()
