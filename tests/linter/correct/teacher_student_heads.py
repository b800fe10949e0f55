import torch
import torch.nn as nn
import torch.nn.functional as F


class Distiller:
    def __init__(self, teacher, student, alpha=0.5, t=2.0):
        self.teacher = teacher.eval()
        self.student = student
        self.alpha, self.t = alpha, t
        self.optimizer = torch.optim.Adam(self.student.parameters())
        self.scaler = torch.amp.GradScaler("cuda")
        self.ce = nn.CrossEntropyLoss()

    def step(self, x, y):
        with torch.autocast("cuda", dtype=torch.float16):
            with torch.no_grad():
                guide = self.teacher(x)
            out = self.student(x)
            soft = F.kl_div(
                F.log_softmax(out / self.t, 1), F.softmax(guide / self.t, 1), reduction="batchmean"
            )
            loss = self.alpha * self.ce(out, y) + (1 - self.alpha) * soft
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
