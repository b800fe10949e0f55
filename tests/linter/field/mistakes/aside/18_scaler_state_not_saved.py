# source: https://github.com/pytorch/vision/pull/4923
# mistake: a resumable checkpoint holds model, optimizer and schedule but not the scaler, so a resumed run starts again at scale 65536 and skips its first steps.
# severity: warning
# torch: any
import argparse

import torch
import torchvision
from torch import nn


def train_one_epoch(model, criterion, optimizer, loader, device, scaler=None):
    model.train()
    for image, target in loader:
        image, target = image.to(device), target.to(device)
        with torch.amp.autocast("cuda", enabled=scaler is not None):
            loss = criterion(model(image), target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()


def main(args):
    device = torch.device("cuda")
    data = torchvision.datasets.FakeData(1000, transform=torchvision.transforms.ToTensor())
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    model = torchvision.models.resnet18(num_classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    scaler = torch.amp.GradScaler("cuda") if args.amp else None

    start = 0
    if args.resume:
        ckpt = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        lr_scheduler.load_state_dict(ckpt["lr_scheduler"])
        start = ckpt["epoch"] + 1

    for epoch in range(start, args.epochs):
        train_one_epoch(model, nn.CrossEntropyLoss(), optimizer, loader, device, scaler)
        lr_scheduler.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  # <- here
        state.update(lr_scheduler=lr_scheduler.state_dict(), epoch=epoch)
        torch.save(state, f"{args.output_dir}/checkpoint.pth")  # <- here


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--epochs", type=int, default=90)
    p.add_argument("--resume", default="")
    p.add_argument("--output-dir", default=".")
    p.add_argument("--amp", action="store_true")
    main(p.parse_args())
