"""
# style of: facebookresearch/deit:losses.py and engine.py
# correct: the frozen teacher runs in its own no_grad autocast block, whose cached casts are gone when the student's block begins; the distillation term is computed in float32.
# torch: 1.10+
"""
import math

import torch
import torch.nn as nn
from torch.nn import functional as F


class DistillationLoss(nn.Module):
    def __init__(self, base_criterion, teacher, kind="soft", alpha=0.5, tau=3.0):
        super().__init__()
        assert kind in ("none", "soft", "hard")
        self.base_criterion = base_criterion
        self.teacher = teacher.eval().requires_grad_(False)
        self.kind, self.alpha, self.tau = kind, alpha, tau

    @torch.no_grad()
    def teacher_logits(self, inputs):
        with torch.autocast("cuda", dtype=torch.float16):
            return self.teacher(inputs).float()

    def forward(self, outputs, labels, teacher_logits):
        outputs_kd = None
        if isinstance(outputs, tuple):
            outputs, outputs_kd = outputs
        base = self.base_criterion(outputs.float(), labels)
        if self.kind == "none":
            return base
        if outputs_kd is None:
            raise ValueError("the student has to return class and distillation token predictions")
        outputs_kd = outputs_kd.float()
        if self.kind == "soft":
            T = self.tau
            kd = F.kl_div(
                F.log_softmax(outputs_kd / T, dim=1),
                F.log_softmax(teacher_logits / T, dim=1),
                reduction="sum",
                log_target=True,
            ) * (T * T) / outputs_kd.numel()
        else:
            kd = F.cross_entropy(outputs_kd, teacher_logits.argmax(dim=1))
        return base * (1 - self.alpha) + kd * self.alpha


def train_one_epoch(student, criterion, data_loader, optimizer, scaler, device, max_norm=0.0, mixup_fn=None):
    student.train()
    for samples, targets in data_loader:
        samples, targets = samples.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        if mixup_fn is not None:
            samples, targets = mixup_fn(samples, targets)
        soft = criterion.teacher_logits(samples)
        with torch.autocast("cuda", dtype=torch.float16):
            outputs = student(samples)
        loss = criterion(outputs, targets, soft)
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"Loss is {loss.item()}, stopping training")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if max_norm > 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(student.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def main(student, teacher, loader, args):
    criterion = DistillationLoss(nn.CrossEntropyLoss(), teacher.to(args.device), args.kind)
    student.to(args.device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.lr, weight_decay=0.05)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(args.epochs):
        print(epoch, train_one_epoch(student, criterion, loader, optimizer, scaler, args.device, args.clip_grad))
