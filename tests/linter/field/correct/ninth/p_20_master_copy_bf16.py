# why correct: the model's weights are bfloat16, but the optimizer steps a float32 master copy whose values are copied back, so small updates are kept
import torch
import torch.nn as nn
import torch.nn.functional as F


class MasterOptimizer:
    def __init__(self, params, factory):
        self.low = [p for p in params if p.requires_grad]
        self.master = [nn.Parameter(p.detach().float().clone()) for p in self.low]
        self.inner = factory(self.master)

    @property
    def param_groups(self):
        return self.inner.param_groups

    @torch.no_grad()
    def collect(self):
        for m, p in zip(self.master, self.low):
            if p.grad is None:
                continue
            g = p.grad.float()
            m.grad = g if m.grad is None else m.grad + g
            p.grad = None

    @torch.no_grad()
    def step(self, clip=None):
        norm = nn.utils.clip_grad_norm_(self.master, clip) if clip else None
        self.inner.step()
        for m, p in zip(self.master, self.low):
            p.copy_(m)
            m.grad = None
        return norm

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "master": [m.detach().cpu() for m in self.master]}

    def load_state_dict(self, d):
        self.inner.load_state_dict(d["inner"])
        with torch.no_grad():
            for m, p, v in zip(self.master, self.low, d["master"]):
                m.copy_(v)
                p.copy_(m)


class GRULM(nn.Module):
    def __init__(self, vocab=8192, dim=1024):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, 3, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.out(self.norm(self.rnn(self.emb(ids))[0]))


def train(loader, updates=50_000, accum=4):
    net = GRULM().cuda().to(torch.bfloat16)
    opt = MasterOptimizer(net.parameters(), lambda ps: torch.optim.AdamW(ps, lr=1e-4, weight_decay=0.05))
    it = iter(loader)
    for u in range(updates):
        for _ in range(accum):
            ids = next(it).cuda()
            logits = net(ids[:, :-1]).float()
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / accum
            loss.backward()
            opt.collect()
        norm = opt.step(clip=1.0)
        if u % 500 == 0:
            print(u, loss.item() * accum, norm.item())
            torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "update": u}, "grulm.pt")
