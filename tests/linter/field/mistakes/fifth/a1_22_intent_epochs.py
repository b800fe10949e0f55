# source: conservationtechlab/animl-py issue #298
# mistake: the helper that is called once per epoch makes a new GradScaler each time, so the adapted loss scale and its growth counter are thrown away at every epoch
# severity: warning
import json
from collections import Counter
from pathlib import Path

import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader, Dataset


class Utterances(Dataset):
    def __init__(self, file: Path, vocab: dict, intents: dict):
        self.items = []
        for line in file.read_text().splitlines():
            row = json.loads(line)
            ids = [vocab.get(w, 1) for w in row["text"].lower().split()][:40]
            self.items.append((ids, intents[row["intent"]]))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def pad(batch):
    width = max(len(ids) for ids, _ in batch)
    x = torch.zeros(len(batch), width, dtype=torch.long)
    for row, (ids, _) in enumerate(batch):
        x[row, : len(ids)] = torch.tensor(ids)
    return x, torch.tensor([y for _, y in batch])


class IntentNet(nn.Module):
    def __init__(self, n_words, n_intents, dim=300, hidden=512):
        super().__init__()
        self.emb = nn.Embedding(n_words, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, hidden, 2, bidirectional=True, batch_first=True, dropout=0.3)
        self.out = nn.Sequential(nn.LayerNorm(2 * hidden), nn.Dropout(0.3), nn.Linear(2 * hidden, n_intents))

    def forward(self, x):
        h, _ = self.lstm(self.emb(x))
        h = h.masked_fill(x.eq(0).unsqueeze(-1), -1e4)
        return self.out(h.amax(1))


def one_epoch(net, loader, opt, loss_fn, mixed_precision):
    net.train()
    scaler = GradScaler(enabled=mixed_precision)  # <- here
    hit = n = 0
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        opt.zero_grad()
        with autocast(enabled=mixed_precision):
            logits = net(x)
            loss = loss_fn(logits, y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        hit += (logits.argmax(1) == y).sum().item()
        n += y.numel()
    return hit / n


@torch.inference_mode()
def score(net, loader):
    net.eval()
    hit = n = 0
    for x, y in loader:
        hit += (net(x.cuda()).argmax(1).cpu() == y).sum().item()
        n += y.numel()
    return hit / n


def fit(root="intents", epochs=50, mixed_precision=True):
    root = Path(root)
    rows = [json.loads(s) for s in (root / "train.jsonl").read_text().splitlines()]
    counts = Counter(w for r in rows for w in r["text"].lower().split())
    vocab = {w: i + 2 for i, (w, c) in enumerate(counts.most_common()) if c > 1}
    intents = {n: i for i, n in enumerate(sorted({r["intent"] for r in rows}))}
    train = DataLoader(Utterances(root / "train.jsonl", vocab, intents), 128, shuffle=True, collate_fn=pad)
    dev = DataLoader(Utterances(root / "dev.jsonl", vocab, intents), 512, collate_fn=pad)

    net = IntentNet(len(vocab) + 2, len(intents)).cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.05)
    best = 0.0
    for epoch in range(epochs):
        tr = one_epoch(net, train, opt, loss_fn, mixed_precision)  # <- here
        dv = score(net, dev)
        print(f"{epoch:3d} train {tr:.4f} dev {dv:.4f}")
        if dv > best:
            best = dv
            torch.save({"net": net.state_dict(), "vocab": vocab, "intents": intents}, root / "best.pt")
