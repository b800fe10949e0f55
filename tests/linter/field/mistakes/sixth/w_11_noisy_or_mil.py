# source: fastino-ai/GLiNER2 pull request #155
# mistake: the guard clamp(max=1 - 1e-6) acts on bfloat16 probabilities, where 1 - 1e-6 is exactly 1, so a saturated instance gives log1p(-1) = -inf and NaN gradients
# severity: error
import torch
import torch.nn as nn


class PatchScorer(nn.Module):
    def __init__(self, dim=768, findings=14):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(dim, 512), nn.ReLU(), nn.Dropout(0.25), nn.Linear(512, findings))

    def forward(self, bag):
        return self.body(bag)


class NoisyOrPooling(nn.Module):
    """P(bag positive) = 1 - prod_i (1 - p_i), worked out as a sum of logs."""

    def forward(self, logits, valid):
        p = torch.sigmoid(logits)  # <- here
        log_none = torch.log1p(-p.clamp(max=1.0 - 1e-6))  # <- here
        log_none = log_none.masked_fill(~valid.unsqueeze(-1), 0.0)
        return log_none.sum(1)


def bag_nll(log_none, target):
    log_none = log_none.float()
    log_some = torch.log(-torch.expm1(log_none.clamp(max=-1e-6)))
    return -(target * log_some + (1 - target) * log_none).mean()


class MILRunner:
    def __init__(self, lr=3e-4, epochs=50, device="cuda"):
        self.device = device
        self.epochs = epochs
        self.scorer = PatchScorer().to(device)
        self.pool = NoisyOrPooling()
        self.opt = torch.optim.AdamW(self.scorer.parameters(), lr=lr, weight_decay=1e-4)

    def forward(self, bag, valid):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.pool(self.scorer(bag), valid)

    def train(self, loader):
        for epoch in range(self.epochs):
            self.scorer.train()
            tot = 0.0
            for bag, valid, target in loader:
                bag = bag.to(self.device, non_blocking=True)
                valid = valid.to(self.device, non_blocking=True)
                target = target.to(self.device, non_blocking=True).float()
                loss = bag_nll(self.forward(bag, valid), target)
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(self.scorer.parameters(), 1.0)
                self.opt.step()
                tot += loss.item()
            print(f"epoch {epoch}: {tot / len(loader):.4f}")

    @torch.no_grad()
    def predict(self, loader):
        self.scorer.eval()
        out = []
        for bag, valid, _ in loader:
            log_none = self.forward(bag.to(self.device), valid.to(self.device))
            out.append((-torch.expm1(log_none.float())).cpu())
        return torch.cat(out)
