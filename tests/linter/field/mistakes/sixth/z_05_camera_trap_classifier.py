# source: conservationtechlab/animl-py issue #298 (PR #304)
# mistake: a new GradScaler is made on every epoch, which resets the loss scale to 65536 and its growth counter each time
# severity: warning
import torch
import yaml
from torch import nn, optim
from torch.utils.data import DataLoader
from torchvision import models
from tqdm import trange


def load_model(num_classes, device):
    net = models.efficientnet_v2_m(weights="IMAGENET1K_V1")
    net.classifier[1] = nn.Linear(net.classifier[1].in_features, num_classes)
    return net.to(device)


def _epoch(loader: DataLoader, model, optimizer, device, mixed_precision=False):
    model.train()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    scaler = torch.amp.GradScaler(device.type) if mixed_precision else None  # <- here
    loss_total, hits, seen = 0.0, 0, 0
    for images, species, _paths in loader:
        images, species = images.to(device), species.to(device)
        optimizer.zero_grad()
        if scaler is not None:
            with torch.autocast(device.type, dtype=torch.float16):
                prediction = model(images)
                loss = criterion(prediction, species)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            prediction = model(images)
            loss = criterion(prediction, species)
            loss.backward()
            optimizer.step()
        loss_total += loss.item() * len(images)
        hits += (prediction.argmax(1) == species).sum().item()
        seen += len(images)
    return loss_total / seen, hits / seen


@torch.inference_mode()
def _validate(loader, model, device):
    model.eval()
    good = n = 0
    for images, species, _paths in loader:
        out = model(images.to(device)).argmax(1).cpu()
        good += (out == species).sum().item()
        n += len(images)
    return good / n


def train_classifier(cfg_path):
    with open(cfg_path) as fh:
        cfg = yaml.safe_load(fh)
    device = torch.device(cfg.get("device", "cuda"))
    from traps import species_loader

    train_dl = species_loader(cfg["train_csv"], cfg["batch_size"], train=True)
    val_dl = species_loader(cfg["val_csv"], cfg["batch_size"], train=False)
    model = load_model(cfg["num_classes"], device)
    optimizer = optim.SGD(model.parameters(), lr=cfg["lr"], weight_decay=cfg["weight_decay"], momentum=0.9)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg["num_epochs"])
    best = 0.0
    for epoch in trange(cfg["num_epochs"]):
        loss, acc = _epoch(train_dl, model, optimizer, device, cfg.get("mixed_precision", False))  # <- here
        scheduler.step()
        val = _validate(val_dl, model, device)
        print(f"{epoch}: loss {loss:.3f} train {acc:.3f} val {val:.3f}")
        if val > best:
            best = val
            torch.save(model.state_dict(), cfg["out"])


if __name__ == "__main__":
    import sys

    train_classifier(sys.argv[1])
