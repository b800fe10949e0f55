# why correct: the bfloat16 model is only a working copy; the optimizer updates float32 masters that receive float32 copies of the gradients
import torch
import torch.nn as nn
import torch.nn.functional as F


class MasterAdamW:
    def __init__(self, model, **kw):
        self.low = [p for p in model.parameters() if p.requires_grad]
        self.high = [p.detach().clone().float().requires_grad_(True) for p in self.low]
        self.inner = torch.optim.AdamW(self.high, **kw)

    @property
    def param_groups(self):
        return self.inner.param_groups

    def zero_grad(self):
        for p in self.low:
            p.grad = None

    @torch.no_grad()
    def step(self, max_norm):
        for lo, hi in zip(self.low, self.high):
            hi.grad = None if lo.grad is None else lo.grad.float()
        norm = nn.utils.clip_grad_norm_(self.high, max_norm)
        self.inner.step()
        for lo, hi in zip(self.low, self.high):
            lo.copy_(hi)
            hi.grad = None
        return norm

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "high": [p.detach().cpu() for p in self.high]}

    @torch.no_grad()
    def load_state_dict(self, sd):
        self.inner.load_state_dict(sd["inner"])
        for lo, hi, saved in zip(self.low, self.high, sd["high"]):
            hi.copy_(saved)
            lo.copy_(hi)


class Music(nn.Module):
    def __init__(self, codes=2048, dim=1024, depth=12, heads=16, length=1500):
        super().__init__()
        self.emb, self.pos = nn.Embedding(codes, dim), nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, batch_first=True, norm_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, depth), nn.Linear(dim, codes)

    def forward(self, ids):
        t = ids.shape[1]
        x = self.emb(ids) + self.pos(torch.arange(t, device=ids.device))
        causal = torch.ones(t, t, dtype=torch.bool, device=ids.device).triu(1)
        return self.head(self.body(x, mask=causal))


def train(batches, lr=2e-4, path="music.pt"):
    model = Music().cuda()
    opt = MasterAdamW(model, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    model.bfloat16()
    opt.low = [p for p in model.parameters() if p.requires_grad]
    for step, ids in enumerate(batches):
        ids = ids.cuda()
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        norm = opt.step(1.0)
        if step % 100 == 0:
            print(step, loss.item(), norm.item())
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, path)
