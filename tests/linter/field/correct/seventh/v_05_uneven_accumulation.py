# why correct: micro-batches are grouped first, each loss is divided by the real group's token count, and unscale/clip/step/update happen once per group, also for the short last one
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn


def groups(it, n):
    it = iter(it)
    while chunk := list(islice(it, n)):
        yield chunk


class Tagger(nn.Module):
    def __init__(self, vocab=50_000, tags=17, dim=300):
        super().__init__()
        self.e = nn.Embedding(vocab, dim, padding_idx=0)
        self.r = nn.LSTM(dim, 400, 2, batch_first=True, bidirectional=True, dropout=0.3)
        self.o = nn.Linear(800, tags)

    def forward(self, ids):
        return self.o(self.r(self.e(ids))[0])


def micro_loss(net, ids, tags, total_tokens):
    with torch.autocast("cuda", dtype=torch.float16):
        logits = net(ids)
        raw = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-100, reduction="sum")
    return raw / total_tokens


def fit(loader, epochs=12, n=6):
    net = Tagger().cuda()
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for ep in range(epochs):
        net.train()
        mean = 0.0
        for chunk in groups(loader, n):
            tokens = max(1, sum(int((t != -100).sum()) for _, t in chunk))
            opt.zero_grad()
            value = 0.0
            for ids, tags in chunk:
                loss = micro_loss(net, ids.cuda(), tags.cuda(), tokens)
                scaler.scale(loss).backward()
                value += loss.item()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            scaler.step(opt)
            scaler.update()
            mean = 0.98 * mean + 0.02 * value
        print(ep, mean, scaler.get_scale())
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "amp": scaler.state_dict()}, f"tagger{ep}.pt")


if __name__ == "__main__":
    from ud import batches

    fit(batches("en_ewt", 32))
