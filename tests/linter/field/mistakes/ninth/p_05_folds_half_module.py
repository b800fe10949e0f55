# source: Lightning-AI/pytorch-lightning#5140
# mistake: the network is converted to float16 with .half() and then trained through a GradScaler, whose unscale step refuses float16 gradients
# severity: error
import torch
import torch.nn as nn
import torchvision

CFG = dict(classes=2, size=224, folds=5, epochs=30, lr=1e-3, batch=32)


def build_net(num_classes):
    net = torchvision.models.resnet18(weights=None)
    net.fc = nn.Linear(net.fc.in_features, num_classes)
    return net


def prepare(net, device):
    net = net.to(device)
    net = net.half()  # <- here
    return net


def fit_fold(fold, train_loader, val_loader, device=torch.device("cuda")):
    net = prepare(build_net(CFG["classes"]), device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=CFG["lr"])
    scaler = torch.cuda.amp.GradScaler()  # <- here
    best = 0.0
    for epoch in range(CFG["epochs"]):
        net.train()
        for images, labels in train_loader:
            images = images.to(device, dtype=torch.float16)
            labels = labels.to(device)
            optimizer.zero_grad()
            with torch.cuda.amp.autocast():
                loss = criterion(net(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # <- here
            scaler.update()
        acc = validate(net, val_loader, device)
        if acc > best:
            best = acc
            torch.save(net.state_dict(), f"fold{fold}.pt")
        print(f"[fold {fold}] epoch {epoch} acc {acc:.3f}")
    return best


@torch.no_grad()
def validate(net, loader, device):
    net.eval()
    right = total = 0
    for images, labels in loader:
        with torch.cuda.amp.autocast():
            pred = net(images.to(device, dtype=torch.float16)).argmax(1).cpu()
        right += int((pred == labels).sum())
        total += labels.numel()
    return right / max(total, 1)


def cross_validate(make_loaders):
    scores = [fit_fold(k, *make_loaders(k)) for k in range(CFG["folds"])]
    print("mean accuracy", sum(scores) / len(scores))
