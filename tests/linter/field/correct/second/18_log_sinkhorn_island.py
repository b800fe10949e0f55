"""
# style of: magicleap/SuperGluePretrainedNetwork:models/superglue.py
# correct: the optimal transport layer leaves autocast and casts its input, so logsumexp and the tiny guard are computed in float32.
# torch: 1.10+
"""
import torch
from torch import nn
from torch.nn import functional as F


def log_sinkhorn_iterations(Z, log_mu, log_nu, iters):
    u, v = torch.zeros_like(log_mu), torch.zeros_like(log_nu)
    for _ in range(iters):
        u = log_mu - torch.logsumexp(Z + v.unsqueeze(1), dim=2)
        v = log_nu - torch.logsumexp(Z + u.unsqueeze(2), dim=1)
    return Z + u.unsqueeze(2) + v.unsqueeze(1)


def log_optimal_transport(scores, alpha, iters):
    with torch.autocast(scores.device.type, enabled=False):
        scores, alpha = scores.float(), alpha.float()
        b, m, n = scores.shape
        bins0, bins1 = alpha.expand(b, m, 1), alpha.expand(b, 1, n)
        couplings = torch.cat([torch.cat([scores, bins0], -1), torch.cat([bins1, alpha.expand(b, 1, 1)], -1)], 1)
        norm = -torch.log(torch.tensor(float(m + n), device=scores.device))
        log_mu = torch.cat([norm.expand(m), torch.log(torch.tensor([float(n)], device=scores.device)) + norm])
        log_nu = torch.cat([norm.expand(n), torch.log(torch.tensor([float(m)], device=scores.device)) + norm])
        Z = log_sinkhorn_iterations(couplings, log_mu.expand(b, -1), log_nu.expand(b, -1), iters)
        return Z - norm


class Matcher(nn.Module):
    def __init__(self, dim=256, layers=6, iters=50):
        super().__init__()
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, batch_first=True)
        self.gnn = nn.TransformerEncoder(layer, layers)
        self.final_proj = nn.Linear(dim, dim)
        self.bin_score = nn.Parameter(torch.tensor(1.0))
        self.iters = iters

    def forward(self, desc0, desc1):
        m0, m1 = self.final_proj(self.gnn(desc0)), self.final_proj(self.gnn(desc1))
        scores = torch.einsum("bmd,bnd->bmn", m0 / m0.shape[-1] ** 0.25, m1 / m1.shape[-1] ** 0.25)
        return log_optimal_transport(scores, self.bin_score, self.iters)


def match_loss(log_p, matches, eps=1e-9):
    """matches: B x (M+1) x (N+1) with ones where the two keypoints belong together."""
    return -(log_p * matches).sum((1, 2)).div(matches.sum((1, 2)) + eps).mean()


def train(model, loader, epochs, lr=1e-4):
    model = model.cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        model.train()
        for desc0, desc1, matches in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                log_p = model(F.normalize(desc0.cuda(), dim=-1), F.normalize(desc1.cuda(), dim=-1))
            loss = match_loss(log_p, matches.cuda().float())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        print(epoch, loss.item())
