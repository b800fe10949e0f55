# source: https://github.com/graphnet-team/graphnet/issues/846
# mistake: binary_cross_entropy on sigmoid outputs is called inside autocast, which PyTorch refuses with an error
# severity: error
import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import negative_sampling


class Encoder(nn.Module):
    def __init__(self, d_in, d_hidden, d_out):
        super().__init__()
        self.first = SAGEConv(d_in, d_hidden)
        self.second = SAGEConv(d_hidden, d_out)

    def forward(self, x, edges):
        h = self.first(x, edges).relu()
        h = F.dropout(h, 0.3, self.training)
        return self.second(h, edges)


class EdgeHead(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * d, d), nn.ReLU(), nn.Linear(d, 1))

    def forward(self, z, pairs):
        both = torch.cat([z[pairs[0]], z[pairs[1]]], dim=-1)
        return torch.sigmoid(self.mlp(both)).squeeze(-1)  # <- here


class EdgeModel(nn.Module):
    def __init__(self, d_in, d=128):
        super().__init__()
        self.encoder = Encoder(d_in, 2 * d, d)
        self.head = EdgeHead(d)

    def forward(self, x, edges, pairs):
        return self.head(self.encoder(x, edges), pairs)


def edge_loss(prob, label):
    return F.binary_cross_entropy(prob, label)  # <- here


def step(model, graph, opt, scaler, use_amp):
    model.train()
    fake = negative_sampling(graph.edge_index, graph.num_nodes, graph.edge_index.shape[1])
    pairs = torch.cat([graph.edge_index, fake], dim=1)
    label = torch.zeros(pairs.shape[1], device=pairs.device)
    label[: graph.edge_index.shape[1]] = 1.0

    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
        prob = model(graph.x, graph.edge_index, pairs)
        loss = edge_loss(prob, label)  # <- here
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return loss.item()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("graph")
    ap.add_argument("--epochs", type=int, default=300)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--full-precision", action="store_true")
    args = ap.parse_args()
    graph = torch.load(args.graph, weights_only=False).to("cuda")
    use_amp = not args.full_precision
    model = EdgeModel(graph.num_features).cuda()
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
    for epoch in range(args.epochs):
        value = step(model, graph, opt, scaler, use_amp)
        if epoch % 10 == 0:
            print(epoch, f"{value:.4f}")
