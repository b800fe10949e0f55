# why correct: only the frozen teacher is converted with .half(); the trained student keeps float32 weights, so the scaler sees float32 gradients
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision


def frozen_half(net):
    net = net.half().eval()
    for p in net.parameters():
        p.requires_grad = False
    return net


def kd(student, teacher, T):
    s = F.log_softmax(student.float() / T, -1)
    t = F.softmax(teacher.float() / T, -1)
    return F.kl_div(s, t, reduction="batchmean") * T * T


class Distiller:
    def __init__(self, teacher, student, T=4.0, alpha=0.7, lr=0.05):
        self.teacher = frozen_half(teacher.cuda())
        self.student = student.cuda()
        self.T, self.alpha = T, alpha
        self.opt = torch.optim.SGD(self.student.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
        self.scaler = torch.cuda.amp.GradScaler()

    @torch.no_grad()
    def targets(self, x):
        return self.teacher(x.half())

    def step(self, x, y):
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        soft = self.targets(x)
        with torch.cuda.amp.autocast():
            logits = self.student(x)
            loss = self.alpha * kd(logits, soft, self.T) + (1 - self.alpha) * F.cross_entropy(logits, y)
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()

    def export(self, path):
        import copy

        deployed = copy.deepcopy(self.student).eval().half()
        torch.jit.trace(deployed, torch.randn(1, 3, 224, 224).cuda().half()).save(path)

    @torch.no_grad()
    def accuracy(self, loader):
        self.student.eval()
        hit = n = 0
        for x, y in loader:
            hit += (self.student(x.cuda()).argmax(1).cpu() == y).sum().item()
            n += len(y)
        self.student.train()
        return hit / n


def main(train, val):
    d = Distiller(torchvision.models.resnet50(weights="DEFAULT"), torchvision.models.mobilenet_v3_small(weights=None))
    for e in range(90):
        for x, y in train:
            loss = d.step(x, y)
        print(e, loss, d.accuracy(val))
    d.export("student_fp16.pt")
