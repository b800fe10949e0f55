# source: https://github.com/lightonai/pylate/issues/239
# mistake: the guard 1e-8 against division by zero is 0 in float16, so a group of equal scores divides by zero under fp16 autocast and the loss becomes NaN
# severity: error
import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class LateInteraction(nn.Module):
    def __init__(self, backbone, hidden=768, dim=128):
        super().__init__()
        self.backbone = backbone
        self.proj = nn.Linear(hidden, dim, bias=False)

    def encode(self, ids, mask):
        h = self.proj(self.backbone(input_ids=ids, attention_mask=mask).last_hidden_state)
        return h * mask.unsqueeze(-1).to(h.dtype)

    def forward(self, query, docs):
        q = self.encode(*query)
        b, n, t = docs[0].shape
        d = self.encode(docs[0].view(b * n, t), docs[1].view(b * n, t)).view(b, n, t, -1)
        sim = torch.matmul(q.unsqueeze(1), d.transpose(-1, -2))
        return sim.amax(dim=-1).mean(dim=-1)


def minmax(scores):
    low = scores.min(dim=-1, keepdim=True).values
    high = scores.max(dim=-1, keepdim=True).values
    return (scores - low) / (high - low + 1e-8)  # <- here


def distill_loss(student_scores, teacher_scores):
    student = F.log_softmax(minmax(student_scores), dim=-1)  # <- here
    teacher = F.log_softmax(teacher_scores, dim=-1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def fit_one_epoch(model, optimizer, scaler, loader, max_norm=1.0):
    model.train()
    for query, docs, teacher_scores in loader:
        query = tuple(t.cuda() for t in query)
        docs = tuple(t.cuda() for t in docs)
        optimizer.zero_grad(set_to_none=True)
        with autocast(dtype=torch.float16):
            scores = model(query, docs)
            loss = distill_loss(scores, teacher_scores.cuda().float())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        yield loss.item()


def main(backbone, loader, epochs=3):
    model = LateInteraction(backbone).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    scaler = GradScaler()
    for epoch in range(epochs):
        for step, value in enumerate(fit_one_epoch(model, optimizer, scaler, loader)):
            if step % 200 == 0:
                print(epoch, step, value)
