import argparse
import json
import os
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from torchvision.models import resnet18

CONFIG = {
    "seed": 17,
    "epochs": 60,
    "batch_size": 256,
    "lr": 0.2,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "grad_clip": 1.0,
    "amp": True,
    "data_root": "./data",
    "out_dir": "./runs/cifar",
}


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def build_loaders(cfg):
    train_tf = transforms.Compose([
        transforms.RandomCrop(32, padding=4),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
    ])
    train = datasets.CIFAR10(cfg["data_root"], train=True, transform=train_tf, download=True)
    test = datasets.CIFAR10(cfg["data_root"], train=False, transform=transforms.ToTensor())
    return (
        DataLoader(train, cfg["batch_size"], shuffle=True, num_workers=4, drop_last=True),
        DataLoader(test, 512, num_workers=4),
    )


def main(cfg):
    seed_everything(cfg["seed"])
    os.makedirs(cfg["out_dir"], exist_ok=True)
    train_loader, test_loader = build_loaders(cfg)
    model = resnet18(num_classes=10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg["lr"], momentum=cfg["momentum"],
                                weight_decay=cfg["weight_decay"], nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg["epochs"])
    scaler = torch.amp.GradScaler("cuda", enabled=cfg["amp"])
    history = []
    for epoch in range(cfg["epochs"]):
        model.train()
        for images, labels in train_loader:
            images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16, enabled=cfg["amp"]):
                loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            scaler.scale(loss).backward()
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), cfg["grad_clip"])  # <- here
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()

        model.eval()
        correct = 0
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16, enabled=cfg["amp"]):
            for images, labels in test_loader:
                pred = model(images.cuda()).argmax(1)
                correct += (pred == labels.cuda()).sum().item()
        acc = correct / len(test_loader.dataset)
        history.append({"epoch": epoch, "acc": acc, "loss": loss.item(), "grad_norm": grad_norm.item()})
        print(history[-1])
    with open(os.path.join(cfg["out_dir"], "history.json"), "w") as f:
        json.dump(history, f)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-amp", action="store_true")
    args = parser.parse_args()
    CONFIG["amp"] = not args.no_amp
    main(CONFIG)
