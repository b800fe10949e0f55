# source: j-adamczyk/MLOps_course_AGH pull request #14
# mistake: the small file for the edge device is written with net.half(), which turns the very model being trained into float16, so the next epoch fails at scaler.unscale_ (and weights are rounded)
# severity: error
import argparse
import pathlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast
from torchvision import datasets, models, transforms

IMAGE = 224


def loaders(root, batch):
    norm = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    tr = transforms.Compose([transforms.RandomResizedCrop(IMAGE), transforms.RandomHorizontalFlip(),
                             transforms.ToTensor(), norm])
    te = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(IMAGE),
                             transforms.ToTensor(), norm])
    mk = torch.utils.data.DataLoader
    return (mk(datasets.ImageFolder(f"{root}/train", tr), batch, shuffle=True, num_workers=8, drop_last=True),
            mk(datasets.ImageFolder(f"{root}/val", te), batch, num_workers=8))


@torch.inference_mode()
def accuracy(net, loader):
    net.eval()
    good = total = 0
    for img, label in loader:
        with autocast("cuda", dtype=torch.float16):
            guess = net(img.cuda()).argmax(1).cpu()
        good += (guess == label).sum().item()
        total += label.numel()
    return good / total


def write_edge_weights(net, where: pathlib.Path):
    """The device runs float16 only: ship half the bytes."""
    net.eval()
    torch.save(net.half().state_dict(), where)  # <- here


def write_resume(net, opt, scaler, epoch, where: pathlib.Path):
    torch.save({"net": net.state_dict(), "opt": opt.state_dict(),
                "scaler": scaler.state_dict(), "epoch": epoch}, where)


def main(argv=None):
    p = argparse.ArgumentParser()
    p.add_argument("root")
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/leaf"))
    p.add_argument("--epochs", type=int, default=25)
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--clip", type=float, default=2.0)
    a = p.parse_args(argv)
    a.out.mkdir(parents=True, exist_ok=True)

    train_dl, val_dl = loaders(a.root, a.batch)
    net = models.mobilenet_v3_large(weights="DEFAULT")
    net.classifier[-1] = nn.Linear(net.classifier[-1].in_features, len(train_dl.dataset.classes))
    net.cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=4e-4, weight_decay=0.02)
    scaler = GradScaler("cuda")
    top = 0.0

    for epoch in range(a.epochs):
        net.train()
        for img, label in train_dl:
            img, label = img.cuda(non_blocking=True), label.cuda(non_blocking=True)
            with autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(net(img), label, label_smoothing=0.1)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), a.clip)
            scaler.step(opt)
            scaler.update()

        acc = accuracy(net, val_dl)
        print(f"[{epoch}] val acc {acc:.3%}")
        write_resume(net, opt, scaler, epoch, a.out / "last.pt")
        if acc > top:
            top = acc
            write_edge_weights(net, a.out / "edge_fp16.pt")  # <- here


if __name__ == "__main__":
    main()
