# why correct: binary_cross_entropy gets float32 probabilities in a region where autocast is off
import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class Interaction(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(3 * d, d), nn.ReLU(), nn.Linear(d, d))
        self.node = nn.Sequential(nn.Linear(2 * d, d), nn.ReLU(), nn.Linear(d, d))

    def forward(self, h, e, src, dst):
        e = e + self.edge(torch.cat([h[src], h[dst], e], -1)).float()
        pooled = torch.zeros_like(h).index_add_(0, dst, e)
        return h + self.node(torch.cat([h, pooled], -1)).float(), e


class TrackGNN(nn.Module):
    def __init__(self, d=64, rounds=6):
        super().__init__()
        self.node_in, self.edge_in = nn.Linear(3, d), nn.Linear(4, d)
        self.rounds = nn.ModuleList(Interaction(d) for _ in range(rounds))
        self.out = nn.Linear(d, 1)

    def forward(self, g):
        src, dst = g["edges"]
        h, e = self.node_in(g["hits"]).float(), self.edge_in(g["geometry"]).float()
        for r in self.rounds:
            h, e = r(h, e, src, dst)
        return torch.sigmoid(self.out(e).float()).squeeze(-1)


def soft_f1(p, y):
    hit = (p * y).sum()
    return 1 - 2 * hit / (p.sum() + y.sum()).clamp_min(1.0)


def objective(prob, truth, weight):
    with autocast(enabled=False):
        prob, truth = prob.float(), truth.float()
        bce = F.binary_cross_entropy(prob, truth, weight=weight.float())
        return bce + 0.2 * soft_f1(prob, truth)


def main(graphs, epochs=40):
    net = TrackGNN().cuda()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    scaler = GradScaler()
    for epoch in range(epochs):
        running = 0.0
        for g in graphs:
            g = {k: v.cuda(non_blocking=True) for k, v in g.items()}
            opt.zero_grad()
            with autocast():
                prob = net(g)
                loss = objective(prob, g["truth"], g["weight"])
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_value_(net.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()
            running += loss.item()
        print(epoch, running / len(graphs))
    torch.save(net.state_dict(), "tracks.pt")
