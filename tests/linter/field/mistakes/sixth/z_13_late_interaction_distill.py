# source: lightonai/pylate issue #239 (PR #240)
# mistake: the min-max normalisation guards its divisor with 1e-8, which is zero in the float16 the scores are in; a group with equal scores gives 0/0 = NaN
# severity: error
from typing import Dict, Iterator

import torch
from torch import nn

TINY = 1e-8  # <- here


def maxsim(q: torch.Tensor, d: torch.Tensor, d_mask: torch.Tensor) -> torch.Tensor:
    """q (B,Lq,H), d (B,N,Ld,H) -> (B,N)"""
    sim = torch.einsum("bqh,bnkh->bnqk", q, d)
    sim = sim.masked_fill(~d_mask.unsqueeze(2), -1e4)
    return sim.amax(-1).mean(-1)


def rescale(scores: torch.Tensor) -> torch.Tensor:
    lo, hi = scores.amin(1, keepdim=True), scores.amax(1, keepdim=True)
    return (scores - lo) / (hi - lo + TINY)  # <- here


class Student(nn.Module):
    def __init__(self, backbone, out=128):
        super().__init__()
        self.backbone = backbone
        self.down = nn.Linear(backbone.config.hidden_size, out, bias=False)

    def forward(self, ids, mask):
        return self.down(self.backbone(ids, attention_mask=mask).last_hidden_state)


def kd_loss(student: Student, batch: Dict[str, torch.Tensor]) -> torch.Tensor:
    b, n, l = batch["doc_ids"].shape
    q = student(batch["query_ids"], batch["query_mask"])
    d = student(batch["doc_ids"].view(b * n, l), batch["doc_mask"].view(b * n, l)).view(b, n, l, -1)
    scores = rescale(maxsim(q, d, batch["doc_mask"].bool()))  # <- here
    log_s = torch.log_softmax(scores, dim=1)
    t = torch.softmax(batch["teacher"].float(), dim=1)
    return nn.functional.kl_div(log_s, t, reduction="batchmean")


def forever(loader) -> Iterator[Dict[str, torch.Tensor]]:
    while True:
        yield from loader


def run(student, loader, steps=50_000, lr=1e-5, every=500):
    student = student.cuda().train()
    opt = torch.optim.AdamW(student.parameters(), lr=lr)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=steps)
    scaler = torch.amp.GradScaler()
    stream = forever(loader)
    for step in range(1, steps + 1):
        batch = {k: v.cuda() for k, v in next(stream).items()}
        with torch.amp.autocast("cuda", dtype=torch.float16):
            loss = kd_loss(student, batch)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
        sched.step()
        if step % every == 0:
            print(step, f"{loss.item():.5f}")
            torch.save({"net": student.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(),
                        "scaler": scaler.state_dict(), "step": step}, "kd_last.pt")
