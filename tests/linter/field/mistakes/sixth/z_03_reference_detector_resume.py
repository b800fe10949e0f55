# source: pytorch/vision PR #4923 (issue #4509)
# mistake: the checkpoint holds model, optimizer and scheduler but not the loss scaler, so a resumed fp16 run restarts with the default scale and growth counter
# severity: warning
import os
import time

import torch
import torchvision
from torch.utils.data import DataLoader


def parse():
    import argparse

    ap = argparse.ArgumentParser("blood-cell detector")
    ap.add_argument("--data-path", default="/data/bccd")
    ap.add_argument("--epochs", default=26, type=int)
    ap.add_argument("--lr", default=0.02, type=float)
    ap.add_argument("--amp", action="store_true")
    ap.add_argument("--resume", default="")
    ap.add_argument("--output-dir", default="runs/bccd")
    return ap.parse_args()


def collate(batch):
    return tuple(zip(*batch))


def one_epoch(model, opt, loader, device, scaler):
    model.train()
    for images, targets in loader:
        images = [im.to(device) for im in images]
        targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
        with torch.autocast("cuda", dtype=torch.float16, enabled=scaler is not None):
            parts = model(images, targets)
            loss = sum(parts.values())
        opt.zero_grad()
        if scaler is None:
            loss.backward()
            opt.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()


def snapshot(model, opt, sched, epoch, args):
    return {  # <- here
        "model": model.state_dict(),
        "optimizer": opt.state_dict(),  # <- here
        "lr_scheduler": sched.state_dict(),
        "epoch": epoch,
        "args": vars(args),
    }


def restore(path, model, opt, sched):
    ck = torch.load(path, map_location="cpu")
    model.load_state_dict(ck["model"])
    opt.load_state_dict(ck["optimizer"])  # <- here
    sched.load_state_dict(ck["lr_scheduler"])
    return ck["epoch"] + 1


def main(args):
    from bccd import CellDataset

    device = torch.device("cuda")
    loader = DataLoader(CellDataset(args.data_path), 4, shuffle=True, collate_fn=collate, num_workers=4)
    model = torchvision.models.detection.retinanet_resnet50_fpn(num_classes=4).to(device)
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=args.lr, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [16, 22], gamma=0.1)
    scaler = torch.cuda.amp.GradScaler() if args.amp else None  # <- here

    start = 0
    if args.resume:
        start = restore(args.resume, model, opt, sched)  # <- here

    os.makedirs(args.output_dir, exist_ok=True)
    began = time.time()
    for epoch in range(start, args.epochs):
        one_epoch(model, opt, loader, device, scaler)
        sched.step()
        state = snapshot(model, opt, sched, epoch, args)  # <- here
        torch.save(state, os.path.join(args.output_dir, f"model_{epoch}.pth"))  # <- here
        torch.save(state, os.path.join(args.output_dir, "checkpoint.pth"))  # <- here
    print("took", time.time() - began)


if __name__ == "__main__":
    main(parse())
