"""
# style of: timgaripov/swa:train.py (with torch.optim.swa_utils)
# correct: the average is taken once per epoch, far behind the first steps the scaler may skip; batch norm statistics are renewed under the same autocast.
# torch: 1.10+
"""
import argparse
import time

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import SWALR, AveragedModel

import cifar
import nets


def train_epoch(loader, model, optimizer, scaler, amp):
    model.train()
    loss_sum, correct, seen = 0.0, 0, 0
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        with torch.cuda.amp.autocast(enabled=amp):
            output = model(x)
            loss = F.cross_entropy(output, y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        loss_sum += loss.item() * x.size(0)
        correct += (output.argmax(1) == y).sum().item()
        seen += x.size(0)
    return loss_sum / seen, 100.0 * correct / seen


@torch.no_grad()
def renew_bn(loader, model, amp):
    for m in model.modules():
        if isinstance(m, torch.nn.modules.batchnorm._BatchNorm):
            m.reset_running_stats()
            m.momentum = None
    model.train()
    with torch.cuda.amp.autocast(enabled=amp):
        for x, _ in loader:
            model(x.cuda(non_blocking=True))


@torch.no_grad()
def evaluate(loader, model, amp):
    model.eval()
    correct = seen = 0
    with torch.cuda.amp.autocast(enabled=amp):
        for x, y in loader:
            correct += (model(x.cuda()).argmax(1).cpu() == y).sum().item()
            seen += y.numel()
    return 100.0 * correct / seen


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=200)
    p.add_argument("--swa_start", type=int, default=161)
    p.add_argument("--swa_lr", type=float, default=0.05)
    p.add_argument("--lr_init", type=float, default=0.1)
    p.add_argument("--amp", action="store_true")
    args = p.parse_args()

    train_loader, test_loader = cifar.loaders(batch_size=128)
    model = nets.vgg16_bn(num_classes=100).cuda()
    swa_model = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr_init, momentum=0.9, weight_decay=3e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.swa_start)
    swa_scheduler = SWALR(optimizer, swa_lr=args.swa_lr, anneal_epochs=5)
    scaler = torch.cuda.amp.GradScaler(enabled=args.amp)

    for epoch in range(args.epochs):
        start = time.time()
        loss, acc = train_epoch(train_loader, model, optimizer, scaler, args.amp)
        if epoch >= args.swa_start:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
        print(f"{epoch}: loss {loss:.4f} acc {acc:.2f} {time.time() - start:.1f}s")

    renew_bn(train_loader, swa_model, args.amp)
    print("averaged:", evaluate(test_loader, swa_model, args.amp))


if __name__ == "__main__":
    main()
