# source: https://github.com/conservationtechlab/animl-py/issues/298
# mistake: a new GradScaler is built inside the function that runs every epoch, so the loss scale and growth counter start over each epoch
# severity: warning
import csv
import sys

import torch
import torch.nn as nn
import torchvision
from torch.utils.data import DataLoader


def species_net(n):
    net = torchvision.models.efficientnet_v2_s(weights="IMAGENET1K_V1")
    net.classifier[1] = nn.Linear(net.classifier[1].in_features, n)
    return net


def one_pass(net, loader, optimizer, criterion, device, mixed):
    net.train()
    scaler = torch.amp.GradScaler(device.type, enabled=mixed)  # <- here
    seen = hits = 0
    running = 0.0
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.float16, enabled=mixed):
            logits = net(images)
            loss = criterion(logits, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        running += loss.item() * labels.numel()
        hits += (logits.argmax(1) == labels).sum().item()
        seen += labels.numel()
    return running / seen, hits / seen


@torch.inference_mode()
def validate(net, loader, device, mixed):
    net.eval()
    seen = hits = 0
    for images, labels in loader:
        with torch.autocast(device.type, dtype=torch.float16, enabled=mixed):
            logits = net(images.to(device))
        hits += (logits.argmax(1).cpu() == labels).sum().item()
        seen += labels.numel()
    return hits / seen


def train_species(train_set, val_set, n_classes, epochs=40, lr=1e-3, mixed=True):
    device = torch.device("cuda")
    net = species_net(n_classes).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    train_dl = DataLoader(train_set, 64, shuffle=True, num_workers=8, pin_memory=True)
    val_dl = DataLoader(val_set, 128, num_workers=8, pin_memory=True)
    out = csv.writer(sys.stdout)
    best = 0.0
    for epoch in range(epochs):
        loss, acc = one_pass(net, train_dl, optimizer, criterion, device, mixed)  # <- here
        schedule.step()
        val = validate(net, val_dl, device, mixed)
        out.writerow([epoch, f"{loss:.4f}", f"{acc:.4f}", f"{val:.4f}"])
        if val > best:
            best = val
            torch.save(net.state_dict(), "species_best.pt")
    return net
