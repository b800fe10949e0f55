# source: conservationtechlab/animl-py issue #298 https://github.com/conservationtechlab/animl-py/issues/298
# mistake: the helper that trains one epoch builds a fresh GradScaler each time, so the adapted loss scale is thrown away every epoch
# severity: warning
import sys

import torch
import torchvision
import yaml
from torch.utils.data import DataLoader
from torchvision import transforms


def make_loaders(cfg):
    tf = transforms.Compose([
        transforms.RandomResizedCrop(cfg["size"]),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
    ])
    train = torchvision.datasets.ImageFolder(cfg["train_dir"], tf)
    val = torchvision.datasets.ImageFolder(cfg["val_dir"], tf)
    mk = lambda d, s: DataLoader(d, cfg["batch"], shuffle=s, num_workers=8, pin_memory=True)
    return mk(train, True), mk(val, False), len(train.classes)


def one_pass(loader, net, criterion, opt, device, half):
    net.train()
    scaler = torch.cuda.amp.GradScaler(enabled=half)  # <- here
    seen, right, total = 0, 0, 0.0
    for images, species in loader:
        images, species = images.to(device), species.to(device)
        opt.zero_grad()
        with torch.cuda.amp.autocast(enabled=half):
            logits = net(images)
            loss = criterion(logits, species)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        seen += len(species)
        right += (logits.argmax(1) == species).sum().item()
        total += loss.item() * len(species)
    return total / seen, right / seen


@torch.no_grad()
def check(loader, net, device):
    net.eval()
    right = seen = 0
    for images, species in loader:
        pred = net(images.to(device)).argmax(1).cpu()
        right += (pred == species).sum().item()
        seen += len(species)
    return right / seen


def main(path):
    with open(path) as fh:
        cfg = yaml.safe_load(fh)
    device = torch.device("cuda")
    train, val, n = make_loaders(cfg)
    net = torchvision.models.efficientnet_v2_m(num_classes=n).to(device)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    opt = torch.optim.SGD(net.parameters(), lr=cfg["lr"], momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, cfg["epochs"])
    best = 0.0
    for epoch in range(cfg["epochs"]):
        loss, acc = one_pass(train, net, criterion, opt, device, cfg["mixed_precision"])  # <- here
        score = check(val, net, device)
        sched.step()
        print(f"{epoch:03d} loss={loss:.4f} acc={acc:.3f} val={score:.3f}")
        if score > best:
            best = score
            torch.save(net.state_dict(), "best_weights.pt")


if __name__ == "__main__":
    main(sys.argv[1])
