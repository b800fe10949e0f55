"""
# source: https://github.com/fastino-ai/GLiNER2/pull/155
# mistake: 1 - 1e-6 rounds to exactly 1 in float16, so clamping half probabilities there does nothing and log1p(-1) is -inf with NaN gradients.
# severity: error
# torch: any
"""
import torch
import torch.nn.functional as F
from torch import nn


class SpanBoundaryModel(nn.Module):
    def __init__(self, encoder, hidden=768, num_types=16):
        super().__init__()
        self.encoder = encoder
        self.start = nn.Linear(hidden, num_types)
        self.end = nn.Linear(hidden, num_types)
        self.pair = nn.Bilinear(hidden, hidden, num_types)

    def forward(self, ids, mask):
        h = self.encoder(ids, attention_mask=mask).last_hidden_state
        pooled = h.mean(dim=1)
        return self.start(h), self.end(h), self.pair(pooled, pooled)


def survival_consistency(start_logits, pair_logits):
    probs = torch.sigmoid(start_logits)
    log_survival = torch.log1p(-probs.clamp(max=1.0 - 1e-6))  # <- here
    any_start = 1 - torch.exp(log_survival.sum(dim=1))
    return F.mse_loss(any_start, torch.sigmoid(pair_logits).detach())


class Trainer:
    def __init__(self, model, loader, consistency_weight=0.1, fp16=True, lr=1e-5):
        self.model = model.cuda()
        self.loader = loader
        self.weight = consistency_weight
        self.fp16 = fp16
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda", enabled=fp16)

    def compute_loss(self, batch):
        start, end, pair = self.model(batch["ids"], batch["mask"])
        loss = F.binary_cross_entropy_with_logits(start, batch["start"])
        loss = loss + F.binary_cross_entropy_with_logits(end, batch["end"])
        return loss + self.weight * survival_consistency(start, pair)

    def train_epoch(self):
        self.model.train()
        total = 0.0
        for batch in self.loader:
            batch = {k: v.cuda() for k, v in batch.items()}
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, enabled=self.fp16):
                loss = self.compute_loss(batch)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            total += loss.item()
        return total / len(self.loader)
