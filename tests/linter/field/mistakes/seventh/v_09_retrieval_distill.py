# source: lightonai/pylate issue #239 https://github.com/lightonai/pylate/issues/239
# mistake: the guard 1e-8 added to a float16 range is zero in half precision, so a group of equal scores divides 0 by 0 and gives NaN
# severity: error
import torch
import torch.nn as nn
import torch.nn.functional as F


class TokenEncoder(nn.Module):
    def __init__(self, vocab=30522, dim=128):
        super().__init__()
        self.emb = nn.Embedding(vocab, 256, padding_idx=0)
        self.mix = nn.LSTM(256, 256, batch_first=True, bidirectional=True)
        self.low = nn.Linear(512, dim)

    def forward(self, ids):
        h, _ = self.mix(self.emb(ids))
        return self.low(h)


def late_interaction(q, d):
    # q: B,Lq,D   d: B,N,Ld,D
    sim = torch.einsum("bqd,bnkd->bnqk", q, d)
    return sim.amax(-1).mean(-1)


class ScoreDistiller(nn.Module):
    def __init__(self, temperature=0.5):
        super().__init__()
        self.t = temperature
        self.guard = 1e-8

    def rescale(self, s):
        lo = s.min(dim=-1, keepdim=True).values
        hi = s.max(dim=-1, keepdim=True).values
        return (s - lo) / (hi - lo + self.guard)  # <- here

    def forward(self, student, teacher):
        student = self.rescale(student.half())  # <- here
        logp = F.log_softmax(student / self.t, dim=-1)
        ref = F.softmax(teacher.float() / self.t, dim=-1)
        return F.kl_div(logp, ref, reduction="batchmean")


def train(loader, epochs=3):
    enc = TokenEncoder().cuda()
    distil = ScoreDistiller()
    opt = torch.optim.Adam(enc.parameters(), 2e-5)
    scaler = torch.amp.GradScaler("cuda")
    for ep in range(epochs):
        for query, docs, teacher in loader:
            query, docs, teacher = query.cuda(), docs.cuda(), teacher.cuda()
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                b, n, length = docs.shape
                q = enc(query)
                d = enc(docs.view(b * n, length)).view(b, n, length, -1)
                loss = distil(late_interaction(q, d), teacher)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        print("epoch", ep, "loss", float(loss))
    torch.save(enc.state_dict(), "encoder.pt")


if __name__ == "__main__":
    from triples import distill_loader

    train(distill_loader("msmarco-scores", n_docs=8))
