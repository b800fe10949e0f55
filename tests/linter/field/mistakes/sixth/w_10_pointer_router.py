# source: NVIDIA/apex issue #1105 (same: facebookresearch/fairseq issue #3575)
# mistake: visited nodes are masked with -1e9 in scores that are float16 under autocast; the value doesn't fit into float16 and masked_fill raises
# severity: error
import math

import torch
from torch import nn
from torch.distributions import Categorical

BLOCKED = -1e9  # <- here


class GlimpseEncoder(nn.Module):
    def __init__(self, d, layers=3, heads=8):
        super().__init__()
        self.embed = nn.Linear(2, d)
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers)

    def forward(self, xy):
        return self.blocks(self.embed(xy))


class PointerDecoder(nn.Module):
    def __init__(self, d, sharpness=10.0):
        super().__init__()
        self.q = nn.Linear(2 * d, d, bias=False)
        self.k = nn.Linear(d, d, bias=False)
        self.sharpness = sharpness
        self.d = d

    def forward(self, nodes, current, visited):
        graph = nodes.mean(1)
        query = self.q(torch.cat([graph, current], -1)).unsqueeze(1)
        score = torch.bmm(query, self.k(nodes).transpose(1, 2)).squeeze(1) / math.sqrt(self.d)
        score = self.sharpness * torch.tanh(score)
        return score.masked_fill(visited, BLOCKED)  # <- here


class Router(nn.Module):
    def __init__(self, d=128):
        super().__init__()
        self.enc = GlimpseEncoder(d)
        self.dec = PointerDecoder(d)

    def forward(self, xy, greedy=False):
        b, n, _ = xy.shape
        nodes = self.enc(xy)
        visited = torch.zeros(b, n, dtype=torch.bool, device=xy.device)
        at = torch.zeros(b, dtype=torch.long, device=xy.device)
        rows = torch.arange(b, device=xy.device)
        order, logp = [], torch.zeros(b, device=xy.device)
        for _ in range(n):
            dist = Categorical(logits=self.dec(nodes, nodes[rows, at], visited).float())
            at = dist.probs.argmax(-1) if greedy else dist.sample()
            logp = logp + dist.log_prob(at)
            visited = visited.clone()
            visited[rows, at] = True
            order.append(at)
        return torch.stack(order, 1), logp


def tour_length(xy, order):
    path = xy.gather(1, order.unsqueeze(-1).expand(-1, -1, 2))
    return (path - path.roll(-1, 1)).norm(dim=-1).sum(1)


def reinforce(steps=20_000, batch=512, nodes=50, device="cuda"):
    net = Router().to(device)
    opt = torch.optim.Adam(net.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(steps):
        xy = torch.rand(batch, nodes, 2, device=device)
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16, cache_enabled=False):
            base, _ = net(xy, greedy=True)
        with torch.autocast("cuda", dtype=torch.float16):
            order, logp = net(xy)
        advantage = tour_length(xy, order) - tour_length(xy, base)
        loss = (advantage.detach() * logp).mean()
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        if step % 200 == 0:
            print(step, tour_length(xy, order).mean().item())


if __name__ == "__main__":
    reinforce()
