# source: conservationtechlab/animl-py#298
# mistake: a new GradScaler is made in the helper that trains one epoch, so the adapted loss scale is thrown away at the start of every epoch
# severity: warning
import csv
from pathlib import Path

import torch
import torch.nn as nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm


def _pass(model, loader, device, opt=None, mixed=True):
    crit = nn.CrossEntropyLoss(label_smoothing=0.1)
    model.train(opt is not None)
    scaler = torch.amp.GradScaler("cuda", enabled=mixed)  # <- here
    total, right, n = 0.0, 0, 0
    bar = tqdm(loader, leave=False)
    for crops, species in bar:
        crops, species = crops.to(device), species.to(device)
        with torch.set_grad_enabled(opt is not None):
            with torch.autocast("cuda", dtype=torch.float16, enabled=mixed):
                logits = model(crops)
                loss = crit(logits, species)
        if opt is not None:
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        total += loss.item() * len(species)
        right += (logits.argmax(1) == species).sum().item()
        n += len(species)
        bar.set_postfix(loss=total / n, acc=right / n)
    return total / n, right / n


def train_classifier(model, train_loader, val_loader, out, epochs=50, lr=1e-2, mixed=True):
    out = Path(out)
    out.mkdir(exist_ok=True, parents=True)
    device = torch.device("cuda")
    model.to(device)
    opt = SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    sched = CosineAnnealingLR(opt, T_max=epochs)
    best = float("inf")
    with open(out / "log.csv", "w", newline="") as fh:
        writer = csv.writer(fh)
        writer.writerow(["epoch", "train", "train_acc", "val", "val_acc"])
        for epoch in range(epochs):
            tr = _pass(model, train_loader, device, opt, mixed)  # <- here
            va = _pass(model, val_loader, device, None, mixed)
            sched.step()
            writer.writerow([epoch, *tr, *va])
            if va[0] < best:
                best = va[0]
                torch.save(model.state_dict(), out / "best.pt")
    return model
