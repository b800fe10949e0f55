# why correct: bfloat16 outputs are cast with .float() in a small helper before .numpy(), and training needs no scaler since autocast is bfloat16
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def to_np(t):
    t = t.detach()
    if t.dtype is torch.bfloat16:
        t = t.float()
    return t.cpu().numpy()


class TextTower(nn.Module):
    def __init__(self, vocab=30522, dim=384, out=256):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.pos = nn.Embedding(256, dim)
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(dim, 6, 4 * dim, batch_first=True), 4,
                                         enable_nested_tensor=False)
        self.out = nn.Linear(dim, out)

    def forward(self, ids):
        pad = ids == 0
        h = self.emb(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))
        h = self.enc(h, src_key_padding_mask=pad)
        keep = (~pad).unsqueeze(-1).float()
        mean = (h.float() * keep).sum(1) / keep.sum(1).clamp(min=1.0)
        return self.out(mean)


def info_nce(a, b, temp):
    a, b = F.normalize(a.float(), dim=-1), F.normalize(b.float(), dim=-1)
    with torch.autocast("cuda", enabled=False):
        logits = a @ b.t() * temp.exp().clamp(max=100.0)
    y = torch.arange(len(a), device=a.device)
    return 0.5 * (F.cross_entropy(logits, y) + F.cross_entropy(logits.t(), y))


@torch.no_grad()
def build_index(model, loader):
    model.eval()
    rows = []
    for ids in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            rows.append(to_np(model(ids.cuda())))
    mat = np.concatenate(rows)
    return mat / np.linalg.norm(mat, axis=1, keepdims=True).clip(1e-9)


def recall_at(model, queries, docs, k=10):
    q, d = build_index(model, queries), build_index(model, docs)
    top = np.argpartition(-(q @ d.T), k, axis=1)[:, :k]
    return float((top == np.arange(len(q))[:, None]).any(1).mean())


def train(pairs, queries, docs, epochs=5):
    model = TextTower().cuda()
    temp = nn.Parameter(torch.tensor(2.6, device="cuda"))
    opt = torch.optim.AdamW([*model.parameters(), temp], lr=5e-5)
    for e in range(epochs):
        model.train()
        for a, b in pairs:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = info_nce(model(a.cuda()), model(b.cuda()), temp)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(e, loss.item(), recall_at(model, queries, docs))
