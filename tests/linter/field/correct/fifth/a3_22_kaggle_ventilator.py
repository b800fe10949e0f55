# why correct: one flag switches both autocast and the scaler (a disabled scaler passes everything through), the per-batch schedule advances only when the optimizer did, and the logged loss was never scaled

# %%
import numpy as np
import pandas as pd
import torch
from sklearn.model_selection import GroupKFold
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class CFG:
    epochs = 50
    batch = 512
    lr = 2e-3
    hidden = 256
    folds = 5
    device = "cuda" if torch.cuda.is_available() else "cpu"
    amp = torch.cuda.is_available()


# %%
train = pd.read_csv("../input/ventilator/train.csv")
train["area"] = (train["time_step"] * train["u_in"]).groupby(train["breath_id"]).cumsum()
train["u_in_lag"] = train.groupby("breath_id")["u_in"].shift(1).fillna(0)
cols = ["R", "C", "time_step", "u_in", "u_out", "area", "u_in_lag"]
X = train[cols].to_numpy(np.float32).reshape(-1, 80, len(cols))
X = (X - X.mean((0, 1))) / X.std((0, 1))
y = train["pressure"].to_numpy(np.float32).reshape(-1, 80)
inhale = (train["u_out"].to_numpy() == 0).astype(np.float32).reshape(-1, 80)
breath = train["breath_id"].to_numpy().reshape(-1, 80)[:, 0]


# %%
class Net(nn.Module):
    def __init__(self, n_in, hidden):
        super().__init__()
        self.rnn = nn.LSTM(n_in, hidden, 3, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.SELU(), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.head(self.rnn(x)[0]).squeeze(-1)


def masked_mae(pred, true, mask):
    return ((pred.float() - true).abs() * mask).sum() / mask.sum()


# %%
for fold, (tr, va) in enumerate(GroupKFold(CFG.folds).split(X, y, breath)):
    data = {k: TensorDataset(*(torch.from_numpy(a[i]) for a in (X, y, inhale))) for k, i in (("tr", tr), ("va", va))}
    loader = DataLoader(data["tr"], CFG.batch, shuffle=True, drop_last=True)
    model = Net(len(cols), CFG.hidden).to(CFG.device)
    opt = torch.optim.AdamW(model.parameters(), lr=CFG.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, CFG.lr, epochs=CFG.epochs, steps_per_epoch=len(loader))
    scaler = torch.amp.GradScaler(CFG.device, enabled=CFG.amp)
    best = np.inf

    for epoch in range(CFG.epochs):
        model.train()
        losses = []
        for xb, yb, mb in loader:
            xb, yb, mb = xb.to(CFG.device), yb.to(CFG.device), mb.to(CFG.device)
            opt.zero_grad()
            with torch.autocast(CFG.device, enabled=CFG.amp):
                loss = masked_mae(model(xb), yb, mb)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1000.0)
            scale = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            if scaler.get_scale() >= scale:
                sched.step()
            losses.append(loss.item())

        model.eval()
        errors, weights = [], []
        with torch.no_grad():
            for xb, yb, mb in DataLoader(data["va"], 2048):
                errors.append(masked_mae(model(xb.to(CFG.device)), yb.to(CFG.device), mb.to(CFG.device)).item())
                weights.append(mb.sum().item())
        score = np.average(errors, weights=weights)
        if score < best:
            best = score
            torch.save(model.state_dict(), f"fold{fold}.pt")
        print(fold, epoch, round(float(np.mean(losses)), 4), round(float(score), 4))
