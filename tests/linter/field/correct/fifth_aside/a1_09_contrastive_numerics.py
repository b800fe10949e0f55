# why correct: the half-precision similarities are turned into float32 before tiny epsilons, temperatures and logs touch them, so none of the small constants underflows
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import AutoModel


class Tower(nn.Module):
    def __init__(self, name, dim=256):
        super().__init__()
        self.lm = AutoModel.from_pretrained(name)
        self.proj = nn.Linear(self.lm.config.hidden_size, dim)

    def forward(self, enc):
        h = self.lm(**enc).last_hidden_state
        m = enc["attention_mask"].unsqueeze(-1)
        pooled = (h.float() * m).sum(1) / (m.sum(1) + 1e-9)
        return F.normalize(self.proj(pooled).float(), dim=-1, eps=1e-12)


def minmax(x):
    x = x.float()
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    return (x - low) / (high - low + 1e-8)


def entropy(p):
    p = p.float()
    return -(p * torch.log(p + 1e-10)).sum(-1).mean()


class Contrast(nn.Module):
    def __init__(self, tower):
        super().__init__()
        self.tower = tower
        self.log_temperature = nn.Parameter(torch.tensor(3.0))

    def forward(self, queries, passages, teacher):
        q, p = self.tower(queries), self.tower(passages)
        sims = (q @ p.t()).float()
        logits = sims * self.log_temperature.exp().clamp(max=100.0)
        nce = F.cross_entropy(logits, torch.arange(len(q), device=logits.device))
        shape = F.mse_loss(minmax(sims), minmax(teacher))
        return nce + shape - 1e-3 * entropy(logits.softmax(-1))


def run(name, loader, epochs=2):
    model = Contrast(Tower(name)).cuda().train()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5, eps=1e-8)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(epochs):
        for queries, passages, teacher in loader:
            queries, passages, teacher = queries.to("cuda"), passages.to("cuda"), teacher.cuda()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(queries, passages, teacher)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
    return model
