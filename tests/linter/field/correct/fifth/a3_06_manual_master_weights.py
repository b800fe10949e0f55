# why correct: a float16 model is trained with a hand-written dynamic loss scale and float32 master weights: gradients are copied, divided by the scale in float32, checked, clipped and only then applied
import torch
from torch import nn


class HalfTrainer:
    def __init__(self, model, make_optimizer, scale=2.0 ** 15, patience=1000, clip=1.0):
        model.cuda()
        self.master = [p.detach().clone().float().requires_grad_(True) for p in model.parameters()]
        self.model = model.half()
        for m in self.model.modules():
            if isinstance(m, nn.LayerNorm):
                m.float()
        self.optimizer = make_optimizer(self.master)
        self.scale, self.patience, self.clip = scale, patience, clip
        self.good = 0

    def backward(self, loss):
        for p in self.model.parameters():
            p.grad = None
        (loss.float() * self.scale).backward()

    def gather(self):
        for slow, fast in zip(self.master, self.model.parameters()):
            slow.grad = None if fast.grad is None else fast.grad.float() / self.scale

    def finite(self):
        return all(bool(torch.isfinite(m.grad).all()) for m in self.master if m.grad is not None)

    @torch.no_grad()
    def publish(self):
        for slow, fast in zip(self.master, self.model.parameters()):
            fast.copy_(slow)

    def step(self, loss):
        self.backward(loss)
        self.gather()
        if not self.finite():
            self.scale = max(self.scale / 2, 1.0)
            self.good = 0
            return False
        nn.utils.clip_grad_norm_(self.master, self.clip)
        self.optimizer.step()
        self.publish()
        self.good += 1
        if self.good % self.patience == 0:
            self.scale *= 2
        return True


class Float32Norm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


def sequence_model(features, dim=256, layers=4):
    rows = [nn.Linear(features, dim)]
    for _ in range(layers):
        rows += [Float32Norm(dim), nn.Linear(dim, dim), nn.GELU()]
    return nn.Sequential(*rows, Float32Norm(dim), nn.Linear(dim, 1))


def fit(loader, features, steps):
    trainer = HalfTrainer(sequence_model(features), lambda ps: torch.optim.Adam(ps, lr=1e-3))
    skipped = 0
    for i, (x, y) in zip(range(steps), loader):
        out = trainer.model(x.cuda().half()).squeeze(-1)
        loss = nn.functional.mse_loss(out.float(), y.cuda().float())
        skipped += not trainer.step(loss)
        if i % 100 == 0:
            print(i, loss.item(), trainer.scale, skipped)
    return trainer
