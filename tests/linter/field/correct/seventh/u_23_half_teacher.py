# why correct: the teacher that is cast to float16 is only evaluated; the student that is trained keeps float32 weights
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler, autocast


class DistillArgs(NamedTuple):
    temperature: float = 4.0
    mix: float = 0.7
    lr: float = 1e-3
    max_norm: float = 2.0


class Distiller:
    def __init__(self, teacher: nn.Module, student: nn.Module, args: DistillArgs):
        self.teacher = teacher.cuda().half().eval().requires_grad_(False)
        self.student = student.cuda()
        self.args = args
        self.opt = torch.optim.AdamW(self.student.parameters(), lr=args.lr)
        self.scaler = GradScaler("cuda", init_scale=2.0**12)

    @torch.no_grad()
    def teach(self, x):
        return self.teacher(x.half()).float()

    def kd(self, student_logits, teacher_logits):
        t = self.args.temperature
        return t * t * F.kl_div(
            F.log_softmax(student_logits / t, dim=-1),
            F.log_softmax(teacher_logits / t, dim=-1),
            reduction="batchmean",
            log_target=True,
        )

    def loss(self, x, y):
        soft = self.teach(x)
        with autocast("cuda", dtype=torch.float16):
            logits = self.student(x)
        logits = logits.float()
        m = self.args.mix
        return m * self.kd(logits, soft) + (1 - m) * F.cross_entropy(logits, y)

    def learn(self, loss):
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.student.parameters(), self.args.max_norm)
        self.scaler.step(self.opt)
        self.scaler.update()

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            self.student.train()
            total = 0.0
            for x, y in loader:
                loss = self.loss(x.cuda(non_blocking=True), y.cuda(non_blocking=True))
                self.learn(loss)
                total += loss.item()
            print(f"{epoch}: {total / len(loader):.4f}")

    def export(self, path):
        self.student.eval()
        half = {k: v.half() if v.is_floating_point() else v for k, v in self.student.state_dict().items()}
        torch.save(half, path)
