# why correct: the network is trained with autocast and a scaler, the LBFGS closure works on stored float32 logits without either
import argparse

import timm
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, transforms


def arguments():
    p = argparse.ArgumentParser(description="Weld defect classifier with temperature scaling")
    p.add_argument("folder")
    p.add_argument("--epochs", type=int, default=12)
    p.add_argument("--bs", type=int, default=64)
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--holdout", type=int, default=2000)
    return p.parse_args()


def data(args):
    tf = transforms.Compose(
        [transforms.Resize(288), transforms.CenterCrop(256), transforms.ToTensor(), transforms.Normalize([0.45] * 3, [0.25] * 3)]
    )
    full = datasets.ImageFolder(args.folder, tf)
    order = torch.randperm(len(full), generator=torch.Generator().manual_seed(1)).tolist()
    train = DataLoader(Subset(full, order[args.holdout :]), args.bs, shuffle=True, num_workers=8, drop_last=True)
    held = DataLoader(Subset(full, order[: args.holdout]), 2 * args.bs, num_workers=8)
    return train, held, len(full.classes)


def train_network(net, loader, epochs, lr):
    optimizer = torch.optim.SGD(net.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    plan = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        net.train()
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(net(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        plan.step()
        print(epoch, loss.item())


@torch.no_grad()
def collect(net, loader):
    net.eval()
    outs, labels = [], []
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x.cuda())
        outs.append(out.float())
        labels.append(y.cuda())
    return torch.cat(outs), torch.cat(labels)


class Temperature(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.log_t = nn.Parameter(torch.zeros(()))
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, logits):
        return logits / self.log_t.exp() + self.bias


def calibrate(logits, labels):
    scale = Temperature(logits.size(1)).cuda()
    optimizer = torch.optim.LBFGS(scale.parameters(), lr=0.5, max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(scale(logits), labels)
        loss.backward()
        return loss

    before = F.cross_entropy(scale(logits), labels).item()
    optimizer.step(closure)
    print(f"nll {before:.4f} -> {closure().item():.4f}, T = {scale.log_t.exp().item():.3f}")
    return scale


if __name__ == "__main__":
    args = arguments()
    train, held, classes = data(args)
    net = timm.create_model("resnet50d", pretrained=True, num_classes=classes).cuda()
    train_network(net, train, args.epochs, args.lr)
    torch.save({"net": net.state_dict(), "scale": calibrate(*collect(net, held)).state_dict()}, "weld.pt")
