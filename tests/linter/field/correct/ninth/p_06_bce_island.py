# why correct: nn.BCELoss is used on probabilities, but in a region with autocast disabled and on float32 inputs
import torch
import torch.nn as nn


class NoisyOr(nn.Module):
    """Bag probability from instance probabilities; there is no logit to hand to BCEWithLogits."""

    def forward(self, p, mask):
        q = torch.where(mask, 1 - p, torch.ones_like(p)).clamp(1e-6, 1.0)
        return (1 - torch.exp(torch.log(q).sum(1))).clamp(1e-6, 1 - 1e-6)


class BagModel(nn.Module):
    def __init__(self, dim=768):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 1))
        self.pool = NoisyOr()
        self.crit = nn.BCELoss()

    def forward(self, bags, mask, label):
        z = self.enc(bags).squeeze(-1)
        with torch.autocast("cuda", enabled=False):
            p = torch.sigmoid(z.float())
            bag = self.pool(p, mask)
            loss = self.crit(bag, label.float())
        return loss, bag


def auc(scores, labels):
    order = scores.argsort()
    ranks = torch.empty_like(scores)
    ranks[order] = torch.arange(1, len(scores) + 1, dtype=scores.dtype)
    pos = labels.bool()
    n1, n0 = pos.sum().item(), (~pos).sum().item()
    return (ranks[pos].sum().item() - n1 * (n1 + 1) / 2) / max(n1 * n0, 1)


def train(loader, val, epochs=30):
    model = BagModel().cuda()
    opt = torch.optim.Adam(model.parameters(), lr=2e-4, weight_decay=1e-5)
    scaler = torch.amp.GradScaler("cuda")
    for e in range(epochs):
        model.train()
        for bags, mask, label in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss, _ = model(bags.cuda(), mask.cuda(), label.cuda())
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        model.eval()
        scores, labels = [], []
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            for bags, mask, label in val:
                _, s = model(bags.cuda(), mask.cuda(), label.cuda())
                scores.append(s.cpu())
                labels.append(label)
        print(e, loss.item(), auc(torch.cat(scores), torch.cat(labels)))
