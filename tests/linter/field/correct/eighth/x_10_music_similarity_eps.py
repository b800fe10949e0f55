# why correct: the small constants are used on float32 tensors only, after the float16 network has delivered its embeddings
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler, autocast


def min_max(x, dim=-1, tiny=1e-8):
    x = x.float()
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    return (x - low) / (high - low + tiny)


def entropy(p, tiny=1e-12):
    p = p.float()
    return -(p * (p + tiny).log()).sum(-1)


class TrackEncoder(nn.Module):
    def __init__(self, mels=96, width=256, out=128):
        super().__init__()
        self.front = nn.Conv1d(mels, width, 5, 2, 2)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 6)
        self.pool = nn.Linear(width, 1)
        self.out = nn.Linear(width, out)

    def forward(self, mel):
        h = self.body(self.front(mel).transpose(1, 2))
        weight = self.pool(h).softmax(1)
        return self.out((h * weight).sum(1)), weight.squeeze(-1)


class SoftNeighbourLoss(nn.Module):
    """Similarity distribution of a batch should follow that of the listening statistics."""

    def __init__(self, temperature=0.1, spread=0.01):
        super().__init__()
        self.temperature, self.spread = temperature, spread

    def forward(self, emb, weight, played_together):
        emb = F.normalize(emb.float(), dim=-1, eps=1e-8)
        sim = (emb[:, None] * emb[None]).sum(-1) / self.temperature
        sim.fill_diagonal_(-1e9)
        target = min_max(played_together).fill_diagonal_(0)
        target = target / (target.sum(-1, keepdim=True) + 1e-8)
        return F.kl_div(sim.log_softmax(-1), target, reduction="batchmean") - self.spread * entropy(weight).mean()


def run(loader, epochs=20, seed=0):
    random.seed(seed)
    torch.manual_seed(seed)
    model, loss_fn = TrackEncoder().cuda(), SoftNeighbourLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, eps=1e-8)
    scaler = GradScaler("cuda")
    for epoch in range(epochs):
        for mel, together in loader:
            with autocast("cuda", dtype=torch.float16):
                emb, weight = model(mel.cuda())
                loss = loss_fn(emb, weight, together.cuda())
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        print(f"epoch {epoch}: {loss.item():.4f}, scale {scaler.get_scale():.0f}")
    return model
