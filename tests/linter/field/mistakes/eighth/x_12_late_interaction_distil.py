# source: lightonai/pylate issue #239
# mistake: the guard 1e-8 rounds to zero in float16, so a group with equal scores is divided by zero and gives NaN
# severity: error
import torch
import torch.nn.functional as F
from torch import nn


class ReRankStudent(nn.Module):
    """One query against k passages, scored by the sum over query tokens of the best passage token."""

    def __init__(self, encoder, width, out=96):
        super().__init__()
        self.encoder = encoder
        self.project = nn.Linear(width, out, bias=False)

    def embed(self, tokens):
        hidden = self.encoder(**tokens).last_hidden_state
        return F.normalize(self.project(hidden).float(), dim=-1)

    def forward(self, query, passages, k):
        q = self.embed(query)
        p = self.embed(passages)
        p = p.view(q.size(0), k, p.size(1), p.size(2))
        sim = torch.einsum("bqd,bkpd->bkqp", q, p)
        keep = passages["attention_mask"].view(q.size(0), k, 1, -1).bool()
        sim = sim.masked_fill(~keep, -2.0)
        return sim.amax(-1).mean(-1)


def rescale(scores):
    low = scores.min(dim=1, keepdim=True).values
    high = scores.max(dim=1, keepdim=True).values
    return (scores - low) / (high - low + 1e-8)  # <- here


def distil(student_scores, teacher_scores, temperature=0.25):
    target = torch.softmax(teacher_scores.float() / temperature, dim=-1)
    logp = torch.log_softmax(rescale(student_scores) / temperature, dim=-1)  # <- here
    return F.kl_div(logp, target, reduction="batchmean")


class DistilLoop:
    def __init__(self, student, loader, lr=1e-5, epochs=1, clip=1.0):
        self.student = student.cuda()
        self.loader = loader
        self.epochs = epochs
        self.clip = clip
        self.optimizer = torch.optim.AdamW(student.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, batch):
        query = {n: t.cuda() for n, t in batch["query"].items()}
        passages = {n: t.cuda() for n, t in batch["passages"].items()}
        with torch.autocast("cuda", torch.float16):
            scores = self.student(query, passages, batch["k"])
            loss = distil(scores, batch["teacher"].cuda())
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.student.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(loss.detach())

    def __call__(self):
        self.student.train()
        for epoch in range(self.epochs):
            for i, batch in enumerate(self.loader):
                value = self.step(batch)
                if i % 50 == 0:
                    print(f"{epoch}/{i}: {value:.4f}")
        return self.student
