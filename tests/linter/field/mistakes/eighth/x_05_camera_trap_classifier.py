# source: conservationtechlab/animl-py issue #298
# mistake: a new GradScaler is built in the per-epoch function, so the loss scale that was found is thrown away at each epoch
# severity: warning
import csv
from functools import partial

import timm
import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader
from torchvision import transforms as T

from traps.dataset import CropDataset


def make_loader(table, train, size=299, bs=64):
    ops = [T.Resize((size, size))]
    if train:
        ops += [T.RandomHorizontalFlip(), T.ColorJitter(0.3, 0.3, 0.2)]
    ops += [T.ToTensor(), T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
    return DataLoader(CropDataset(table, T.Compose(ops)), bs, shuffle=train, num_workers=8, drop_last=train)


def train_pass(model, loader, optimizer, loss_fn, device, amp=True):
    scaler = GradScaler(enabled=amp)  # <- here
    model.train()
    seen = correct = 0
    loss_sum = 0.0
    for images, species in loader:
        images = images.to(device)
        species = species.to(device)
        optimizer.zero_grad()
        with autocast(enabled=amp):
            scores = model(images)
            loss = loss_fn(scores, species)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        loss_sum += loss.item() * images.size(0)
        correct += (scores.argmax(1) == species).sum().item()
        seen += images.size(0)
    return loss_sum / seen, correct / seen


@torch.no_grad()
def test_pass(model, loader, loss_fn, device, amp=True):
    model.eval()
    seen = correct = 0
    loss_sum = 0.0
    for images, species in loader:
        images, species = images.to(device), species.to(device)
        with autocast(enabled=amp):
            scores = model(images)
            loss = loss_fn(scores, species)
        loss_sum += loss.item() * images.size(0)
        correct += (scores.argmax(1) == species).sum().item()
        seen += images.size(0)
    return loss_sum / seen, correct / seen


def fit(train_csv, val_csv, n_classes, epochs=30, lr=3e-4, patience=6, out="best.pt"):
    device = "cuda"
    model = timm.create_model("efficientnetv2_rw_m", pretrained=True, num_classes=n_classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.05)
    run_train = partial(train_pass, model, make_loader(train_csv, True), optimizer, loss_fn, device)
    run_test = partial(test_pass, model, make_loader(val_csv, False), loss_fn, device)

    best, waited, rows = 0.0, 0, []
    for epoch in range(epochs):
        tl, ta = run_train()  # <- here
        vl, va = run_test()
        schedule.step()
        rows.append((epoch, tl, ta, vl, va))
        if va > best:
            best, waited = va, 0
            torch.save(model.state_dict(), out)
        else:
            waited += 1
        if waited >= patience:
            break
    with open("history.csv", "w", newline="") as fh:
        csv.writer(fh).writerows(rows)
    return best


if __name__ == "__main__":
    print(fit("train.csv", "val.csv", 53))
