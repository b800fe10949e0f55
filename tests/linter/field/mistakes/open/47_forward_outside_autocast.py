# source: https://github.com/pytorch/vision/pull/4874
# mistake: only the criterion stands inside autocast, the model runs outside it, so --amp gives no mixed precision at all.
# severity: warning
# torch: any
import argparse
import time

import torch
import torchvision
from torch import nn


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, scaler=None):
    model.train()
    start, seen = time.time(), 0
    for i, (image, target) in enumerate(data_loader):
        image, target = image.to(device), target.to(device)
        output = model(image)  # <- here
        optimizer.zero_grad()
        if scaler is not None:
            with torch.amp.autocast("cuda"):
                loss = criterion(output, target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss = criterion(output, target)
            loss.backward()
            optimizer.step()
        seen += image.shape[0]
        if i % args.print_freq == 0:
            print(f"[{epoch}] {i} loss {loss.item():.4f} img/s {seen / (time.time() - start):.1f}")


def main(args):
    device = torch.device(args.device)
    dataset = torchvision.datasets.ImageFolder(
        args.data_path,
        torchvision.transforms.Compose([torchvision.transforms.RandomResizedCrop(224), torchvision.transforms.ToTensor()]),
    )
    loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True, num_workers=8, pin_memory=True)
    model = torchvision.models.get_model(args.model, weights=None, num_classes=len(dataset.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    scaler = torch.amp.GradScaler("cuda") if args.amp else None
    for epoch in range(args.epochs):
        train_one_epoch(model, nn.CrossEntropyLoss(label_smoothing=0.1), optimizer, loader, device, epoch, args, scaler)
        lr_scheduler.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-path", default="imagenet/train")
    parser.add_argument("--model", default="vit_b_16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--print-freq", type=int, default=50)
    parser.add_argument("--amp", action="store_true")
    main(parser.parse_args())
