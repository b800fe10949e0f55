# source: https://github.com/pytorch/vision/pull/4923
# mistake: the checkpoint holds model, optimizer and scheduler but not the GradScaler, so each resume restarts from the default loss scale and throws away steps until it has backed off again
# severity: warning
import os
from pathlib import Path

import torch
from torch import nn
from torchvision.models.segmentation import deeplabv3_resnet50

RUN = Path(os.environ.get("RUN_DIR", "runs/roads"))
DEVICE = torch.device("cuda")


def bundle(net, optim, sched, epoch, best):
    return {  # <- here
        "net": net.state_dict(),
        "optim": optim.state_dict(),
        "sched": sched.state_dict(),
        "epoch": epoch,
        "best_miou": best,
    }


def restore(path, net, optim, sched):
    blob = torch.load(path, map_location="cpu")  # <- here
    net.load_state_dict(blob["net"])
    optim.load_state_dict(blob["optim"])  # <- here
    sched.load_state_dict(blob["sched"])
    return blob["epoch"] + 1, blob["best_miou"]


@torch.inference_mode()
def mean_iou(net, loader, n_cls=5):
    net.eval()
    inter = torch.zeros(n_cls, dtype=torch.float64)
    union = torch.zeros(n_cls, dtype=torch.float64)
    for image, target in loader:
        with torch.autocast("cuda"):
            pred = net(image.to(DEVICE))["out"].argmax(1).cpu()
        for c in range(n_cls):
            a, b = pred == c, target == c
            inter[c] += (a & b).sum()
            union[c] += (a | b).sum()
    return (inter / union.clamp(min=1)).mean().item()


def run(train_loader, val_loader, epochs=80):
    RUN.mkdir(parents=True, exist_ok=True)
    net = deeplabv3_resnet50(num_classes=5, aux_loss=True).to(DEVICE)
    optim = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.PolynomialLR(optim, total_iters=epochs, power=0.9)
    grad_scaler = torch.amp.GradScaler("cuda")  # <- here
    criterion = nn.CrossEntropyLoss(ignore_index=255)

    start, best = 0, 0.0
    last = RUN / "last.pth"
    if last.exists():
        start, best = restore(last, net, optim, sched)  # <- here

    for epoch in range(start, epochs):
        net.train()
        for image, target in train_loader:
            image, target = image.to(DEVICE), target.to(DEVICE)
            optim.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                out = net(image)
                loss = criterion(out["out"], target) + 0.4 * criterion(out["aux"], target)
            grad_scaler.scale(loss).backward()
            grad_scaler.step(optim)
            grad_scaler.update()
        sched.step()
        miou = mean_iou(net, val_loader)
        state = bundle(net, optim, sched, epoch, max(best, miou))  # <- here
        torch.save(state, last)  # <- here
        if miou > best:
            best = miou
            torch.save(net.state_dict(), RUN / "best_weights.pth")
