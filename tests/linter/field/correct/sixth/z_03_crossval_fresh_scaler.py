# why correct: a new GradScaler is made inside a loop, but that loop is over folds, each of which is a complete run with a new model and optimizer
import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import DataLoader, Subset

EPOCHS, FOLDS, SEED = 12, 5, 2024


def make_net():
    return nn.Sequential(
        nn.Conv1d(12, 64, 15, 2, 7), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Conv1d(64, 128, 15, 2, 7), nn.BatchNorm1d(128), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 1),
    )


def fold_loaders(dataset, tr, va):
    return (DataLoader(Subset(dataset, tr), 128, shuffle=True, drop_last=True),
            DataLoader(Subset(dataset, va), 256))


@torch.no_grad()
def predict(net, loader):
    net.eval()
    out = []
    for ecg, _ in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            z = net(ecg.cuda())
        out.append(z.float().sigmoid().squeeze(1).cpu())
    return torch.cat(out).numpy()


def main(dataset, labels):
    oof = np.zeros(len(labels))
    splitter = StratifiedKFold(FOLDS, shuffle=True, random_state=SEED)
    for fold, (tr, va) in enumerate(splitter.split(np.zeros(len(labels)), labels)):
        torch.manual_seed(SEED + fold)
        net = make_net().cuda()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        scaler = torch.cuda.amp.GradScaler()
        train_dl, valid_dl = fold_loaders(dataset, tr, va)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
        pos = torch.tensor((labels[tr] == 0).sum() / max((labels[tr] == 1).sum(), 1), device="cuda", dtype=torch.float32)
        criterion = nn.BCEWithLogitsLoss(pos_weight=pos)
        for epoch in range(EPOCHS):
            net.train()
            for ecg, y in train_dl:
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = criterion(net(ecg.cuda()).squeeze(1), y.cuda().float())
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            sched.step()
        oof[va] = predict(net, valid_dl)
        print(f"fold {fold}: auc {roc_auc_score(labels[va], oof[va]):.4f}")
        torch.save(net.state_dict(), f"ecg_fold{fold}.pt")
        del net, optimizer, scaler
        torch.cuda.empty_cache()
    print("oof auc", roc_auc_score(labels, oof))


if __name__ == "__main__":
    from ecg import load

    main(*load("ptbxl"))
