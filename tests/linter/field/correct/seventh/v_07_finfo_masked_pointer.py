# why correct: the fill value is taken from the scores' own dtype and the two masks are combined as booleans before filling, so nothing overflows in float16
import torch
from torch import nn


class PointerDecoder(nn.Module):
    def __init__(self, dim=256, heads=8):
        super().__init__()
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(dim, heads, 4 * dim, batch_first=True), 4)
        self.inp = nn.Linear(2, dim)
        self.q, self.k = nn.Linear(2 * dim, dim), nn.Linear(dim, dim)
        self.first = nn.Parameter(torch.randn(dim) * 0.02)

    @staticmethod
    def block(scores, forbidden):
        lowest = torch.finfo(scores.dtype).min
        return scores.masked_fill(forbidden, lowest)

    def forward(self, xy, pad, tour):
        h = self.enc(self.inp(xy), src_key_padding_mask=pad)
        b, n, d = h.shape
        pooled = h.masked_fill(pad.unsqueeze(-1), 0).sum(1) / (~pad).sum(1, keepdim=True)
        keys = self.k(h)
        visited = torch.zeros(b, n, dtype=torch.bool, device=xy.device)
        last = self.first.expand(b, d)
        steps = []
        for i in range(tour.size(1)):
            query = self.q(torch.cat([last.to(pooled.dtype), pooled], -1))
            s = torch.bmm(keys, query.unsqueeze(-1)).squeeze(-1) * d ** -0.5
            s = self.block(10 * torch.tanh(s), visited | pad)
            steps.append(torch.log_softmax(s.float(), -1))
            node = tour[:, i]
            visited = visited.scatter(1, node[:, None], True)
            last = h[torch.arange(b, device=h.device), node]
        return torch.stack(steps, 1)


def imitate(net, data, epochs=100):
    opt = torch.optim.Adam(net.parameters(), lr=1e-4)
    scaler = torch.cuda.amp.GradScaler()
    for e in range(epochs):
        for xy, pad, tour, live in data:
            xy, pad, tour, live = xy.cuda(), pad.cuda(), tour.cuda(), live.cuda()
            opt.zero_grad()
            with torch.cuda.amp.autocast():
                logp = net(xy, pad, tour)
            picked = logp.gather(-1, tour.unsqueeze(-1)).squeeze(-1)
            loss = -picked[live].mean()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
        print(e, loss.item())


if __name__ == "__main__":
    from tours import optimal_tours

    imitate(PointerDecoder().cuda(), optimal_tours(nodes=50, batch=256))
