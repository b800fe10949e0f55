# source: NVlabs/pacnet issue #21
# mistake: the custom autograd function has no custom_fwd/custom_bwd, so its backward multiplies float16 gradients with the float32 weights it saved and raises a dtype mismatch
# severity: error
import argparse

import torch
from torch import nn
from torch.nn import functional as F

from trafficnet.data import sensor_loader


class NodeMix(torch.autograd.Function):  # <- here
    """y = A @ (x W) without keeping x W for the backward pass."""

    @staticmethod
    def forward(ctx, x, adjacency, weight):  # <- here
        ctx.save_for_backward(x, adjacency, weight)
        return torch.matmul(adjacency, torch.matmul(x, weight))

    @staticmethod
    def backward(ctx, grad):  # <- here
        x, adjacency, weight = ctx.saved_tensors
        back = torch.matmul(adjacency.t(), grad)  # <- here
        grad_x = torch.matmul(back, weight.t())
        grad_w = torch.einsum("bni,bno->io", x, back)
        return grad_x, None, grad_w


class GraphLayer(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inp, out))
        self.norm = nn.LayerNorm(out)
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x, adjacency):
        return F.gelu(self.norm(NodeMix.apply(x, adjacency, self.weight)))  # <- here


class TrafficNet(nn.Module):
    def __init__(self, history, horizon, adjacency, width=128, depth=4):
        super().__init__()
        degree = adjacency.sum(1, keepdim=True).clamp(min=1)
        self.register_buffer("adjacency", adjacency / degree)
        self.inp = nn.Linear(history, width)
        self.layers = nn.ModuleList(GraphLayer(width, width) for _ in range(depth))
        self.out = nn.Linear(width, horizon)

    def forward(self, x):
        h = self.inp(x)
        for layer in self.layers:
            h = h + layer(h, self.adjacency)
        return self.out(h)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="metr-la.npz")
    ap.add_argument("--epochs", type=int, default=80)
    ap.add_argument("--amp", action="store_true", default=True)
    args = ap.parse_args()

    loader, adjacency = sensor_loader(args.data, batch=64)
    model = TrafficNet(12, 12, adjacency).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    plan = torch.optim.lr_scheduler.MultiStepLR(optimizer, [40, 60], gamma=0.2)
    scaler = torch.cuda.amp.GradScaler(enabled=args.amp)

    for epoch in range(args.epochs):
        total = 0.0
        for past, future in loader:
            past, future = past.cuda(), future.cuda()
            optimizer.zero_grad()
            with torch.cuda.amp.autocast(enabled=args.amp):
                loss = F.l1_loss(model(past), future)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            total += loss.item()
        plan.step()
        print(f"{epoch:3d} mae {total / len(loader):.3f}")
    torch.save(model.state_dict(), "traffic.pt")


if __name__ == "__main__":
    main()
