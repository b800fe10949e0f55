# source: https://github.com/conservationtechlab/animl-py/issues/298
# mistake: a new GradScaler is made in the function that trains one epoch, so the adapted scale is thrown away at every epoch and the first steps of each are skipped
# severity: warning
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

device = "cuda" if torch.cuda.is_available() else "cpu"


def loaders(root, size=299, batch=48):
    norm = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    train_tf = transforms.Compose([transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), transforms.ToTensor(), norm])
    test_tf = transforms.Compose([transforms.Resize(size), transforms.CenterCrop(size), transforms.ToTensor(), norm])
    train = datasets.ImageFolder(f"{root}/train", train_tf)
    test = datasets.ImageFolder(f"{root}/test", test_tf)
    return (
        DataLoader(train, batch, shuffle=True, num_workers=8, drop_last=True),
        DataLoader(test, batch, num_workers=8),
        len(train.classes),
    )


def one_epoch(net, loader, opt, mixed):
    scaler = torch.amp.GradScaler(device, enabled=mixed)  # <- here
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    net.train()
    hits = count = 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        opt.zero_grad()
        with torch.autocast(device, dtype=torch.float16, enabled=mixed):
            logits = net(images)
            loss = loss_fn(logits, labels)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        hits += (logits.argmax(1) == labels).sum().item()
        count += labels.numel()
    return hits / count


@torch.inference_mode()
def accuracy(net, loader):
    net.eval()
    hits = count = 0
    for images, labels in loader:
        hits += (net(images.to(device)).argmax(1).cpu() == labels).sum().item()
        count += labels.numel()
    return hits / count


def main(root, epochs=60):
    train_loader, test_loader, n_classes = loaders(root)
    net = models.efficientnet_v2_s(weights="DEFAULT")
    net.classifier[1] = nn.Linear(net.classifier[1].in_features, n_classes)
    net.to(device)
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    plan = torch.optim.lr_scheduler.MultiStepLR(opt, [30, 50])
    for epoch in range(epochs):
        train_acc = one_epoch(net, train_loader, opt, mixed=device == "cuda")  # <- here
        plan.step()
        print(epoch, round(train_acc, 4), round(accuracy(net, test_loader), 4))
    torch.save(net.state_dict(), "species.pt")


if __name__ == "__main__":
    main(sys.argv[1])
