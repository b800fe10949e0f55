# source: https://github.com/milesial/Pytorch-UNet/issues/468
# mistake: the gradient norm is clipped while the gradients are still multiplied by the loss scale, so nearly every step is clipped to almost nothing.
# severity: error
# %% [code]
import gc
import os
import random

import cv2
import numpy as np
import pandas as pd
import timm
import torch
import torch.nn as nn
from sklearn.model_selection import StratifiedKFold
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader, Dataset

# %% [code]
CFG = dict(seed=719, n_fold=5, arch="tf_efficientnet_b3_ns", side=384, bs=24, epochs=8,
           lr=2e-4, wd=1e-6, max_norm=1000.0, workers=4)
ROOT = "../input/leaf-disease/train_images"


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


seed_everything(CFG["seed"])


# %% [code]
class LeafDataset(Dataset):
    def __init__(self, frame):
        self.names = frame.image_id.values
        self.labels = frame.label.values

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        img = cv2.imread(os.path.join(ROOT, self.names[i]))[:, :, ::-1]
        img = cv2.resize(img, (CFG["side"], CFG["side"])).astype(np.float32) / 255.0
        return torch.from_numpy(img.transpose(2, 0, 1)), int(self.labels[i])


# %% [code]
def fit_epoch(net, loader, crit, opt, scaler, dev):
    net.train()
    total, seen = 0.0, 0
    for img, lab in loader:
        img, lab = img.to(dev, non_blocking=True), lab.to(dev, non_blocking=True)
        with autocast():
            out = net(img)
            loss = crit(out, lab)
        total += loss.item() * lab.size(0)
        seen += lab.size(0)
        scaler.scale(loss).backward()  # <- here
        gn = nn.utils.clip_grad_norm_(net.parameters(), CFG["max_norm"])  # <- here
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return total / seen, float(gn)


@torch.no_grad()
def score(net, loader, dev):
    net.eval()
    good = n = 0
    for img, lab in loader:
        with autocast():
            out = net(img.to(dev))
        good += (out.argmax(1).cpu() == lab).sum().item()
        n += lab.size(0)
    return good / n


# %% [code]
df = pd.read_csv("../input/leaf-disease/train.csv")
dev = torch.device("cuda")
folds = StratifiedKFold(CFG["n_fold"], shuffle=True, random_state=CFG["seed"])
for k, (tr, va) in enumerate(folds.split(df, df.label)):
    train_dl = DataLoader(LeafDataset(df.iloc[tr]), CFG["bs"], shuffle=True, drop_last=True,
                          num_workers=CFG["workers"], pin_memory=True)
    valid_dl = DataLoader(LeafDataset(df.iloc[va]), CFG["bs"] * 2, num_workers=CFG["workers"])
    net = timm.create_model(CFG["arch"], pretrained=True, num_classes=5).to(dev)
    opt = torch.optim.Adam(net.parameters(), lr=CFG["lr"], weight_decay=CFG["wd"])
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=CFG["epochs"], eta_min=1e-6)
    scaler = GradScaler()
    best = 0.0
    for ep in range(CFG["epochs"]):
        tl, gn = fit_epoch(net, train_dl, nn.CrossEntropyLoss(), opt, scaler, dev)
        acc = score(net, valid_dl, dev)
        sched.step()
        print(f"fold {k} epoch {ep} loss {tl:.4f} acc {acc:.4f}")
        if acc > best:
            best = acc
            torch.save(net.state_dict(), f"{CFG['arch']}_fold{k}.pth")
    del net, opt
    gc.collect()
    torch.cuda.empty_cache()
