# source: https://github.com/lightonai/pylate/issues/239
# mistake: the guard 1e-8 in the denominator is zero in float16, so a list of equal scores divides zero by zero and the loss is NaN
# severity: error
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

TINY = 1e-8  # <- here


class Slate(NamedTuple):
    query: torch.Tensor
    candidates: torch.Tensor
    teacher: torch.Tensor


class Encoder(nn.Module):
    def __init__(self, n_in, n_out=128):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, 512), nn.GELU(), nn.Linear(512, n_out))

    def forward(self, x):
        return self.net(x)


def to_unit_range(s):
    low, high = s.amin(-1, keepdim=True), s.amax(-1, keepdim=True)
    return (s - low) / (high - low + TINY)  # <- here


def student_scores(query_net, item_net, slate):
    q = query_net(slate.query)
    c = item_net(slate.candidates)
    return torch.einsum("bd,bkd->bk", q, c)


def distill_loss(scores, teacher):
    student = F.log_softmax(to_unit_range(scores) / 0.1, dim=-1)  # <- here
    target = F.softmax(teacher, dim=-1)
    return F.kl_div(student, target, reduction="batchmean")


def run(slates, n_query, n_item, steps):
    query_net, item_net = Encoder(n_query).cuda(), Encoder(n_item).cuda()
    weights = [*query_net.parameters(), *item_net.parameters()]
    opt = torch.optim.AdamW(weights, lr=2e-4)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0 ** 12)

    for step, raw in zip(range(steps), slates):
        slate = Slate(*(t.cuda(non_blocking=True) for t in raw))
        opt.zero_grad(set_to_none=True)
        with torch.amp.autocast("cuda", dtype=torch.float16):
            scores = student_scores(query_net, item_net, slate)
            loss = distill_loss(scores, slate.teacher)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(weights, 1.0)
        scaler.step(opt)
        scaler.update()
        if step % 250 == 0:
            print(f"{step:6d} kl={loss.item():.4f} scale={scaler.get_scale():.0f}")
    return query_net, item_net
