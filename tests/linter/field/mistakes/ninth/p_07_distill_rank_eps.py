# source: lightonai/pylate#239
# mistake: an epsilon of 1e-8 guards a float16 division under autocast; it rounds to zero in float16 and equal scores give 0/0 = NaN
# severity: error
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim import AdamW


class LateScorer(nn.Module):
    def __init__(self, vocab, dim=128):
        super().__init__()
        self.tok = nn.Embedding(vocab, 384)
        self.proj = nn.Linear(384, dim, bias=False)

    def encode(self, ids):
        return self.proj(self.tok(ids))

    def forward(self, q_ids, d_ids):
        q = self.encode(q_ids)
        B, K, L = d_ids.shape
        d = self.encode(d_ids.view(B * K, L)).view(B, K * L, -1)
        sim = torch.matmul(q, d.transpose(1, 2))
        sim = sim.view(B, q.size(1), K, L)
        return sim.max(-1).values.mean(1)


class RankDistillation(nn.Module):
    def __init__(self, normalize=True):
        super().__init__()
        self.normalize = normalize

    def forward(self, student, teacher):
        if self.normalize:
            lo = student.min(dim=1, keepdim=True).values
            hi = student.max(dim=1, keepdim=True).values
            student = (student - lo) / (hi - lo + 1e-8)  # <- here
        return F.kl_div(F.log_softmax(student, -1), F.softmax(teacher, -1), reduction="batchmean")


def distil(model, loader, steps, lr=1e-5):
    device = "cuda"
    model.to(device).train()
    objective = RankDistillation()
    optim = AdamW(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler()
    it = iter(loader)
    for step in range(steps):
        try:
            queries, docs, teacher = next(it)
        except StopIteration:
            it = iter(loader)
            queries, docs, teacher = next(it)
        queries, docs, teacher = queries.to(device), docs.to(device), teacher.to(device)
        with torch.autocast(device_type=device, dtype=torch.float16):
            scores = model(queries, docs)
            loss = objective(scores, teacher)
        optim.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optim)
        scaler.update()
        if step % 50 == 0:
            print(step, float(loss.detach()))
    return model
