# source: https://github.com/Azure/MS-AMP/pull/45
# mistake: scaler.update() is never called, so the second scaler.step() raises "step() has already been called since the last update()".
# severity: error
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms


class Glyphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(1, 32, 3)
        self.b = nn.Conv2d(32, 64, 3, stride=2)
        self.drop = nn.Dropout(0.3)
        self.c = nn.Linear(64 * 12 * 12, 128)
        self.d = nn.Linear(128, 47)

    def forward(self, x):
        x = F.relu(self.a(x))
        x = F.relu(self.b(x)).flatten(1)
        return self.d(self.drop(F.relu(self.c(x))))


def train(args, model, device, loader, optimizer, scaler, epoch):
    model.train()
    loader.sampler.set_epoch(epoch)
    for i, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(data), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # <- here
        if i % args.log_interval == 0 and dist.get_rank() == 0:
            print(f"epoch {epoch} [{i}/{len(loader)}] loss {loss.item():.5f}")


@torch.no_grad()
def test(model, device, loader):
    model.eval()
    tally = torch.zeros(2, device=device)
    for data, target in loader:
        pred = model(data.to(device)).argmax(dim=1).cpu()
        tally[0] += (pred == target).sum().item()
        tally[1] += len(target)
    dist.all_reduce(tally)
    return (tally[0] / tally[1]).item()


def main():
    parser = argparse.ArgumentParser(description="EMNIST, one process per GPU")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--log-interval", type=int, default=20)
    args = parser.parse_args()

    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)

    tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1751,), (0.3332,))])
    sets = [datasets.EMNIST("../data", "balanced", train=t, download=False, transform=tf) for t in (True, False)]
    train_dl, test_dl = (DataLoader(s, args.batch_size, sampler=DistributedSampler(s), num_workers=2) for s in sets)

    model = DDP(Glyphs().to(device), device_ids=[rank])
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    scaler = torch.cuda.amp.GradScaler()  # <- here
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_dl, optimizer, scaler, epoch)
        acc = test(model, device, test_dl)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {acc:.4f}")
        schedule.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "emnist.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
