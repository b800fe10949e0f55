# source: https://github.com/lightonai/pylate/issues/239
# mistake: scores are float16 under autocast, where the guard 1e-8 is exactly zero, so a group of equal scores divides zero by zero and the loss is NaN.
# severity: error
# torch: any
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DistillScores(nn.Module):
    def __init__(self, encoder: nn.Module, normalize_scores: bool = True):
        super().__init__()
        self.encoder = encoder
        self.normalize_scores = normalize_scores

    def late_interaction(self, q: Tensor, d: Tensor) -> Tensor:
        sims = torch.einsum("bqh,bndh->bnqd", q, d)
        return sims.amax(dim=-1).mean(dim=-1)

    def forward(self, queries: Tensor, documents: Tensor, teacher: Tensor) -> Tensor:
        q = self.encoder(queries)
        d = self.encoder(documents.flatten(0, 1)).unflatten(0, documents.shape[:2])
        scores = self.late_interaction(q, d)
        if self.normalize_scores:
            low = scores.amin(dim=1, keepdim=True)
            high = scores.amax(dim=1, keepdim=True)
            scores = (scores - low) / (high - low + 1e-8)  # <- here
        return F.kl_div(F.log_softmax(scores, dim=-1), F.log_softmax(teacher, dim=-1), reduction="batchmean", log_target=True)


def fit(loss_module: DistillScores, loader, epochs: int = 1, lr: float = 3e-6, device: str = "cuda"):
    loss_module.to(device).train()
    optimizer = torch.optim.AdamW(loss_module.parameters(), lr=lr)
    scaler = torch.amp.GradScaler(device)
    for _ in range(epochs):
        for queries, documents, teacher in loader:
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.float16):
                value = loss_module(queries.to(device), documents.to(device), teacher.to(device))
            scaler.scale(value).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
