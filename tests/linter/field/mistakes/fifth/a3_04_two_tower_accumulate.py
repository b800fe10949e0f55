# source: https://github.com/microsoft/Swin-Transformer/issues/311
# mistake: gradients are unscaled and clipped at every micro-batch although the step comes only every few, so the second unscale_() raises
# severity: error
import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import GradScaler, autocast

SETTINGS = {
    "users": 2_000_000,
    "items": 350_000,
    "dim": 128,
    "batch": 4096,
    "accumulate": 8,
    "lr": 1e-3,
    "max_norm": 1.0,
    "temperature": 0.07,
}


class TwoTower(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.user = nn.Embedding(s["users"], s["dim"])
        self.item = nn.Embedding(s["items"], s["dim"])
        self.user_mlp = nn.Sequential(nn.Linear(s["dim"], 256), nn.ReLU(), nn.Linear(256, s["dim"]))
        self.item_mlp = nn.Sequential(nn.Linear(s["dim"], 256), nn.ReLU(), nn.Linear(256, s["dim"]))

    def forward(self, users, items):
        u = F.normalize(self.user_mlp(self.user(users)).float(), dim=-1)
        v = F.normalize(self.item_mlp(self.item(items)).float(), dim=-1)
        return u, v


def in_batch_softmax(u, v, temperature):
    logits = (u @ v.t()).float() / temperature
    target = torch.arange(u.shape[0], device=u.device)
    return F.cross_entropy(logits, target)


class Fitter:
    def __init__(self, s=SETTINGS):
        self.s = s
        self.model = TwoTower(s).cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=s["lr"])
        self.scaler = GradScaler()
        self.micro = 0

    def consume(self, users, items):
        s = self.s
        with autocast():
            u, v = self.model(users.cuda(non_blocking=True), items.cuda(non_blocking=True))
            loss = in_batch_softmax(u, v, s["temperature"]) / s["accumulate"]
        self.scaler.scale(loss).backward()
        self.micro += 1

        self.scaler.unscale_(self.optimizer)  # <- here
        nn.utils.clip_grad_norm_(self.model.parameters(), s["max_norm"])  # <- here
        if self.micro % s["accumulate"] == 0:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.item() * s["accumulate"]

    def epoch(self, loader):
        losses = [self.consume(users, items) for users, items in loader]
        return sum(losses) / max(len(losses), 1)
