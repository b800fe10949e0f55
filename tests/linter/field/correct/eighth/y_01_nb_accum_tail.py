# why correct: unscale and clip happen only on the micro-batches which step, the last incomplete group steps too and its losses are divided by its own size.
# %% [code]
import math

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModel, AutoTokenizer, get_cosine_schedule_with_warmup

# %% [code]
MODEL = "../input/deberta-v3-large"
ACC = 6
EPOCHS = 4
device = "cuda"
tok = AutoTokenizer.from_pretrained(MODEL)


class Essays(Dataset):
    def __init__(self, df):
        self.text, self.y = df.full_text.tolist(), df.score.values.astype("float32")

    def __len__(self):
        return len(self.text)

    def __getitem__(self, i):
        enc = tok(self.text[i], truncation=True, max_length=1024)
        return enc["input_ids"], self.y[i]


def collate(rows):
    enc = tok.pad({"input_ids": [r[0] for r in rows]}, return_tensors="pt")
    return enc["input_ids"], enc["attention_mask"], torch.tensor([r[1] for r in rows])


# %% [code]
class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        conf = AutoConfig.from_pretrained(MODEL)
        conf.hidden_dropout_prob = conf.attention_probs_dropout_prob = 0.0
        self.body = AutoModel.from_pretrained(MODEL, config=conf)
        self.head = nn.Linear(conf.hidden_size, 1)

    def forward(self, ids, mask):
        h = self.body(ids, attention_mask=mask).last_hidden_state.float()
        m = mask[..., None].float()
        return self.head((h * m).sum(1) / m.sum(1)).squeeze(-1)


# %% [code]
def train_fn(net, loader, opt, sched, scaler):
    net.train()
    n = len(loader)
    tail = n % ACC
    losses = []
    opt.zero_grad(set_to_none=True)
    for i, (ids, mask, y) in enumerate(loader):
        group = tail if tail and i >= n - tail else ACC
        with autocast():
            out = net(ids.to(device), mask.to(device))
            loss = nn.functional.smooth_l1_loss(out.float(), y.to(device))
        scaler.scale(loss / group).backward()
        losses.append(loss.item())
        if (i + 1) % ACC and i + 1 != n:
            continue
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        before = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
        if scaler.get_scale() >= before:
            sched.step()
    return float(np.mean(losses))


@torch.no_grad()
def valid_fn(net, loader):
    net.eval()
    p, t = [], []
    for ids, mask, y in loader:
        with autocast():
            p.append(net(ids.to(device), mask.to(device)).float().cpu())
        t.append(y)
    return torch.cat(p).sub(torch.cat(t)).pow(2).mean().sqrt().item()


# %% [code]
df = pd.read_csv("../input/essays/train_folds.csv")
for fold in (0, 1):
    tr = DataLoader(Essays(df[df.fold != fold]), 4, shuffle=True, collate_fn=collate)
    va = DataLoader(Essays(df[df.fold == fold]), 16, collate_fn=collate)
    net = Scorer().to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-5, weight_decay=0.01)
    total = math.ceil(len(tr) / ACC) * EPOCHS
    sched = get_cosine_schedule_with_warmup(opt, 0, total)
    scaler = GradScaler()
    for ep in range(EPOCHS):
        print(fold, ep, train_fn(net, tr, opt, sched, scaler), valid_fn(net, va))
    torch.save(net.state_dict(), f"fold{fold}.pth")
