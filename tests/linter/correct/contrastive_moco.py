import torch
import torch.nn as nn


def main_worker(args, model, train_loader):
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=args.weight_decay)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(args.start_epoch, args.epochs):
        train(train_loader, model, optimizer, scaler, epoch, args)
        torch.save(
            {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
            },
            "checkpoint.pth.tar",
        )


def train(train_loader, model, optimizer, scaler, epoch, args):
    losses = AverageMeter("Loss", ":.4e")
    model.train()
    for i, (images, _) in enumerate(train_loader):
        images[0] = images[0].cuda(args.gpu, non_blocking=True)
        images[1] = images[1].cuda(args.gpu, non_blocking=True)
        with torch.amp.autocast("cuda", enabled=True):
            loss = model(images[0], images[1], args.moco_m)
        losses.update(loss.detach(), images[0].size(0))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if i % args.print_freq == 0:
            losses.display(i)


class AverageMeter:
    def __init__(self, name, fmt):
        self.name, self.fmt = name, fmt
        self.sum, self.count = 0, 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    def display(self, i):
        print(i, self.name, self.sum / self.count)


class ContrastiveLoss(nn.Module):
    def forward(self, q, k, temperature=0.2):
        q, k = nn.functional.normalize(q, dim=1), nn.functional.normalize(k, dim=1)
        logits = torch.einsum("nc,mc->nm", [q, k]) / temperature
        labels = torch.arange(logits.shape[0], device=logits.device)
        return nn.CrossEntropyLoss()(logits, labels) * (2 * temperature)
