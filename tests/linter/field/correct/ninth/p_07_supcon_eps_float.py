# why correct: the tiny epsilons (1e-12, 1e-8) act on float32 tensors, since features are cast up before normalising
import torch
import torch.nn as nn
import torch.nn.functional as F


def supcon(feats, labels, tau=0.1):
    z = feats.float()
    z = z / (z.norm(dim=1, keepdim=True) + 1e-12)
    with torch.autocast("cuda", enabled=False):
        sim = z @ z.t() / tau
    n = z.size(0)
    eye = torch.eye(n, dtype=torch.bool, device=z.device)
    sim = sim.masked_fill(eye, -1e9)
    logp = sim - sim.logsumexp(1, keepdim=True)
    pos = (labels[:, None] == labels[None]) & ~eye
    per = -(logp * pos).sum(1) / (pos.sum(1) + 1e-8)
    return per[pos.any(1)].sum() / (pos.any(1).sum() + 1e-8)


class Projector(nn.Module):
    def __init__(self, backbone, dim, out=128):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(inplace=True), nn.Linear(dim, out))

    def forward(self, x):
        return self.head(self.backbone(x))


class Plan:
    lr = 0.1
    epochs = 200
    warmup = 10

    @classmethod
    def factor(cls, epoch):
        if epoch < cls.warmup:
            return (epoch + 1) / cls.warmup
        return 0.5 * (1 + torch.cos(torch.tensor(torch.pi * epoch / cls.epochs)).item())


def train(backbone, dim, loader):
    model = Projector(backbone, dim).cuda()
    opt = torch.optim.SGD(model.parameters(), lr=Plan.lr, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, Plan.factor)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(Plan.epochs):
        for (a, b), y in loader:
            x = torch.cat([a, b]).cuda(non_blocking=True)
            y = torch.cat([y, y]).cuda(non_blocking=True)
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = supcon(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        sched.step()
        print(epoch, loss.item())
