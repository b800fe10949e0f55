# source: lightonai/pylate issue #239 (fix: PR #240)
# mistake: a 1e-8 guard is added to float16 scores in a min-max normalisation; it rounds to zero in half precision, so equal scores give 0/0 and NaN gradients
# severity: error
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel


class LateInteraction(nn.Module):
    def __init__(self, name: str, dim: int = 128):
        super().__init__()
        self.lm = AutoModel.from_pretrained(name)
        self.down = nn.Linear(self.lm.config.hidden_size, dim, bias=False)

    def encode(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.lm(input_ids=ids, attention_mask=mask).last_hidden_state
        return F.normalize(self.down(h).float(), dim=-1) * mask.unsqueeze(-1)


def maxsim(q: Tensor, d: Tensor) -> Tensor:
    """q: (B, Lq, D), d: (B, N, Ld, D) -> (B, N), in whatever type the matmul yields."""
    sim = torch.einsum("bqd,bnkd->bnqk", q, d)
    return sim.amax(dim=-1).mean(dim=-1)


class RankDistiller:
    def __init__(self, student: LateInteraction, lr: float = 1e-5, temperature: float = 0.05):
        self.student = student.cuda()
        self.temperature = temperature
        self.optimizer = torch.optim.AdamW(student.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda")

    def rescale(self, scores: Tensor) -> Tensor:
        low = scores.amin(dim=1, keepdim=True)
        high = scores.amax(dim=1, keepdim=True)
        return (scores - low) / (high - low + 1e-8)  # <- here

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        b, n, length = batch["doc_ids"].shape
        with torch.autocast("cuda", dtype=torch.float16):
            q = self.student.encode(batch["query_ids"], batch["query_mask"])
            d = self.student.encode(
                batch["doc_ids"].view(b * n, length), batch["doc_mask"].view(b * n, length)
            ).view(b, n, length, -1)
            scores = maxsim(q, d)
            student = F.log_softmax(self.rescale(scores) / self.temperature, dim=1)
            teacher = F.log_softmax(batch["teacher"].float(), dim=1)
            return F.kl_div(student, teacher, log_target=True, reduction="batchmean")

    def step(self, batch: dict[str, Tensor]) -> float:
        batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
        value = self.loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(value).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return value.item()

    def fit(self, loader, epochs: int = 1, log_every: int = 200):
        self.student.train()
        n = 0
        for _ in range(epochs):
            for batch in loader:
                value = self.step(batch)
                n += 1
                if n % log_every == 0:
                    print(f"{n}: {value:.4f} (scale {self.scaler.get_scale():.0f})")
