"""
# style of: WongKinYiu/yolov7:test.py and train.py
# correct: validation converts a deep copy to half precision, never the trained model; training goes on in float32 weights with the scaler.
# torch: 1.9+
"""
import copy
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm


def test(model, dataloader, half_precision=True, conf=0.001):
    """Runs on a copy, so the caller's weights keep their dtype and mode."""
    device = next(model.parameters()).device
    half = device.type != "cpu" and half_precision
    model = copy.deepcopy(model)
    if half:
        model.half()
    model.eval()
    seen, hits, loss = 0, 0, torch.zeros(1, device=device)
    for img, targets in tqdm(dataloader, leave=False):
        img = img.to(device, non_blocking=True)
        img = (img.half() if half else img.float()) / 255.0
        with torch.no_grad():
            out = model(img).float()
        targets = targets.to(device)
        loss += nn.functional.cross_entropy(out, targets)
        hits += ((out.softmax(1).max(1).values > conf) & (out.argmax(1) == targets)).sum().item()
        seen += len(targets)
    return hits / max(seen, 1), loss.item() / len(dataloader)


def train(hyp, model, train_loader, val_loader, epochs, weights_dir: Path, device):
    model = model.to(device)
    g0, g1 = [], []
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            g0.append(m.weight)
        elif hasattr(m, "weight") and isinstance(m.weight, nn.Parameter):
            g1.append(m.weight)
        if hasattr(m, "bias") and isinstance(m.bias, nn.Parameter):
            g0.append(m.bias)
    optimizer = torch.optim.SGD(g0, lr=hyp["lr0"], momentum=hyp["momentum"], nesterov=True)
    optimizer.add_param_group({"params": g1, "weight_decay": hyp["weight_decay"]})
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    cuda = device.type != "cpu"
    scaler = torch.cuda.amp.GradScaler(enabled=cuda)
    best = 0.0

    for epoch in range(epochs):
        model.train()
        for imgs, targets in train_loader:
            imgs = imgs.to(device, non_blocking=True).float() / 255.0
            with torch.cuda.amp.autocast(enabled=cuda):
                loss = nn.functional.cross_entropy(model(imgs), targets.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scheduler.step()

        acc, val_loss = test(model, val_loader, half_precision=cuda)
        print(f"{epoch}: accuracy {acc:.4f} val loss {val_loss:.4f}")
        ckpt = {
            "epoch": epoch,
            # the exported weights are half, the resumable ones are not
            "export": copy.deepcopy(model).half().state_dict(),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
        }
        torch.save(ckpt, weights_dir / "last.pt")
        if acc > best:
            best = acc
            torch.save(ckpt, weights_dir / "best.pt")
