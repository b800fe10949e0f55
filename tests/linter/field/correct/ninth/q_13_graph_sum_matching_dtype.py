# why correct: messages are cast to the dtype of the accumulator before index_add_, which is float32 so that sums over many neighbours keep precision
import torch
import torch.nn as nn
import torch.nn.functional as F


def neighbour_sum(values, target, count):
    pool = values.new_zeros(count, values.shape[-1], dtype=torch.float32)
    return pool.index_add_(0, target, values.to(pool.dtype))


class GatedConv(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.a, self.b, self.gate = (nn.Linear(dim, dim) for _ in range(3))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, src, dst):
        g = torch.sigmoid(self.gate(x[src] - x[dst]))
        num = neighbour_sum(g * self.a(x)[src], dst, x.shape[0])
        den = neighbour_sum(g, dst, x.shape[0])
        return x + F.relu(self.norm(self.b(x) + num / (den + 1e-6)))


class Router(nn.Module):
    def __init__(self, feats, dim=160, depth=8, classes=8):
        super().__init__()
        self.inp = nn.Linear(feats, dim)
        self.convs = nn.ModuleList(GatedConv(dim) for _ in range(depth))
        self.out = nn.Linear(dim, classes)

    def forward(self, x, src, dst):
        h = self.inp(x)
        for conv in self.convs:
            h = conv(h, src, dst)
        return self.out(h)


def train_step(model, g, optimizer, scaler):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        logits = model(g.x, g.src, g.dst)
        loss = F.cross_entropy(logits[g.train], g.y[g.train])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


@torch.no_grad()
def accuracy(model, g, mask):
    model.eval()
    with torch.autocast("cuda", dtype=torch.float16):
        pred = model(g.x, g.src, g.dst).argmax(-1)
    return (pred[mask] == g.y[mask]).float().mean().item()


def main(graphs, val, feats, epochs=100):
    model = Router(feats).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        model.train()
        losses = torch.stack([train_step(model, g, optimizer, scaler) for g in graphs])
        print(epoch, losses.mean().item(), accuracy(model, val, val.test))
