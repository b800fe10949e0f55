"""A fine-tuning loop as it is often copied, with four mistakes that nothing else reports."""

import os

import torch
from torch.cuda.amp import GradScaler, autocast
from torchvision.models import resnet18


def main(loader, criterion, accumulate=4):
    model = resnet18(num_classes=10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = GradScaler()
    if os.path.exists("last.pt"):
        checkpoint = torch.load("last.pt")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    for i, (images, labels) in enumerate(loader):
        with autocast():
            loss = criterion(model(images.cuda()), labels.cuda()) / accumulate
            scaler.scale(loss).backward()
        if (i + 1) % accumulate == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
