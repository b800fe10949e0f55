# why correct: buffers for scatter/index operations take the dtype of the values put into them, and sums over many faces are made in float32
import torch
from torch import nn


def segment_mean(values, index, n):
    values = values.float()
    total = values.new_zeros(n, values.size(1))
    total.index_add_(0, index, values)
    count = torch.bincount(index, minlength=n).clamp(min=1).to(total.dtype)
    return total / count.unsqueeze(1)


class FaceConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.face = nn.Sequential(nn.Linear(3 * i + 3, o), nn.GELU(), nn.Linear(o, o))
        self.skip = nn.Linear(i, o)
        self.norm = nn.LayerNorm(o)

    def forward(self, x, faces, normals):
        corners = torch.cat([x[faces[:, k]] for k in range(3)] + [normals.to(x.dtype)], -1)
        f = self.face(corners)
        spread = segment_mean(f.repeat(3, 1), faces.t().flatten(), x.size(0))
        return self.norm(self.skip(x) + spread)


class DragNet(nn.Module):
    """Pressure at the vertices of a car body."""

    def __init__(self, fan_in=6, d=128, depth=6):
        super().__init__()
        self.lift = nn.Linear(fan_in, d)
        self.layers = nn.ModuleList(FaceConv(d, d) for _ in range(depth))
        self.known = nn.Linear(fan_in, 1)
        self.out = nn.Linear(d, 1)

    def forward(self, v, faces, normals, wall):
        h = self.lift(v)
        for layer in self.layers:
            h = h + layer(h, faces, normals)
        inner = self.out(h[~wall])
        rim = self.known(v[wall])
        result = inner.new_empty(v.size(0), 1)
        result[~wall] = inner
        result[wall] = rim.to(result.dtype)
        return result.squeeze(1).float()


def relative_l2(pred, true):
    return (pred - true).norm() / true.norm().clamp(min=1e-8)


def fit(train, test, epochs=200, accumulate=4, device="cuda"):
    net = DragNet().to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs)
    scaler = torch.amp.GradScaler(device)
    for epoch in range(epochs):
        net.train()
        pending = 0
        for i, mesh in enumerate(train):
            mesh = {k: t.to(device) for k, t in mesh.items()}
            size = min(accumulate, len(train) - (i // accumulate) * accumulate)
            with torch.autocast(device, dtype=torch.float16):
                pred = net(mesh["v"], mesh["faces"], mesh["normals"], mesh["wall"])
            loss = relative_l2(pred, mesh["pressure"].float())
            scaler.scale(loss / size).backward()
            pending += 1
            if pending == size:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad(set_to_none=True)
                pending = 0
        sched.step()
        net.eval()
        with torch.no_grad():
            errors = []
            for mesh in test:
                mesh = {k: t.to(device) for k, t in mesh.items()}
                pred = net(mesh["v"], mesh["faces"], mesh["normals"], mesh["wall"])
                errors.append(relative_l2(pred, mesh["pressure"].float()).item())
        print(epoch, sum(errors) / len(errors))
