# source: https://github.com/FlyEgle/imageclassification/issues/1
# mistake: optimizer.step() stands after the if/else, so in the fp16 branch the optimizer steps a second time, also when the scaler had skipped the step for infinite gradients.
# severity: error
# torch: any
import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


class Config:
    fp16 = True
    lr = 0.1
    epochs = 90
    root = "data/flowers"


def build(cfg):
    tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    loader = DataLoader(datasets.ImageFolder(cfg.root, tf), batch_size=128, shuffle=True, num_workers=8)
    model = models.resnet50(weights=None, num_classes=102).cuda()
    return model, loader


def train_epoch(cfg, model, loader, criterion, optimizer, scaler):
    model.train()
    total, correct = 0, 0
    for images, labels in loader:
        images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        optimizer.zero_grad()
        if cfg.fp16 is True:
            with torch.amp.autocast("cuda"):
                logits = model(images)
                loss = criterion(logits, labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            logits = model(images)
            loss = criterion(logits, labels)
            loss.backward()
        optimizer.step()  # <- here
        total += labels.numel()
        correct += (logits.argmax(1) == labels).sum().item()
    return correct / total


if __name__ == "__main__":
    cfg = Config()
    net, dl = build(cfg)
    sgd = torch.optim.SGD(net.parameters(), lr=cfg.lr, momentum=0.9, weight_decay=1e-4)
    grad_scaler = torch.amp.GradScaler("cuda", enabled=cfg.fp16)
    for e in range(cfg.epochs):
        print(e, train_epoch(cfg, net, dl, nn.CrossEntropyLoss(), sgd, grad_scaler))
