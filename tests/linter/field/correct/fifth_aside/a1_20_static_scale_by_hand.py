# why correct: a hand-made dynamic loss scale: gradients are divided by the same factor before clipping, non-finite steps are skipped with a smaller factor, and float32 master weights receive the update
import torch
import torch.nn as nn
import torch.nn.functional as F


class ManualScale:
    def __init__(self, start=2.0**14, window=1000, low=1.0):
        self.value, self.window, self.low, self.clean = start, window, low, 0

    def good(self):
        self.clean += 1
        if self.clean == self.window:
            self.value *= 2.0
            self.clean = 0

    def overflow(self):
        self.value = max(self.low, self.value / 2.0)
        self.clean = 0


class HalfTrainer:
    def __init__(self, net, lr=1e-3):
        self.net = net.cuda().half()
        for m in self.net.modules():
            if isinstance(m, nn.LayerNorm):
                m.float()
        self.half_params = [p for p in self.net.parameters() if p.requires_grad]
        self.master = [p.detach().clone().float().requires_grad_() for p in self.half_params]
        self.opt = torch.optim.Adam(self.master, lr=lr, eps=1e-8)
        self.scale = ManualScale()

    def _pull_gradients(self):
        factor = 1.0 / self.scale.value
        for m, p in zip(self.master, self.half_params):
            m.grad = p.grad.float().mul_(factor)
            p.grad = None

    @torch.no_grad()
    def _push_weights(self):
        for m, p in zip(self.master, self.half_params):
            p.copy_(m)

    def step(self, ids, labels, limit=1.0):
        logits = self.net(ids)
        loss = F.cross_entropy(logits.float(), labels)
        (loss * self.scale.value).backward()
        self._pull_gradients()
        norm = nn.utils.clip_grad_norm_(self.master, limit)
        if not torch.isfinite(norm):
            self.scale.overflow()
            return loss.detach(), False
        self.opt.step()
        self._push_weights()
        self.scale.good()
        return loss.detach(), True

    def state_dict(self):
        return {
            "master": [m.detach() for m in self.master],
            "opt": self.opt.state_dict(),
            "scale": (self.scale.value, self.scale.clean),
        }

    def load_state_dict(self, blob):
        with torch.no_grad():
            for m, saved in zip(self.master, blob["master"]):
                m.copy_(saved)
        self._push_weights()
        self.opt.load_state_dict(blob["opt"])
        self.scale.value, self.scale.clean = blob["scale"]


class Float32Norm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


class BagOfWords(nn.Module):
    def __init__(self, vocab=50_000, dim=512, classes=20):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.norm = Float32Norm(dim)
        self.out = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, classes))

    def forward(self, ids):
        return self.out(self.norm(self.emb(ids).float().mean(1).half()))


def main(loader, epochs=5):
    trainer = HalfTrainer(BagOfWords())
    for epoch in range(epochs):
        skipped = 0
        for ids, labels in loader:
            loss, stepped = trainer.step(ids.cuda(), labels.cuda())
            skipped += not stepped
        print(epoch, loss.item(), "skipped", skipped, "scale", trainer.scale.value)
        torch.save(trainer.state_dict(), f"bow{epoch}.pt")
