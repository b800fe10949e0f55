import argparse

import timm
import torch
import torch.nn as nn
from timm.data import create_dataset, create_loader


class NativeScaler:
    state_dict_key = "amp_scaler"

    def __init__(self, enabled=True):
        self._scaler = torch.amp.GradScaler("cuda", enabled=enabled)

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False, need_update=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if not need_update:
            return None
        norm = None
        if clip_grad is not None:
            self._scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state):
        self._scaler.load_state_dict(state)


def train_one_epoch(model, loader, criterion, optimizer, loss_scaler, amp_dtype, accum, clip):
    model.train()
    optimizer.zero_grad()
    usable = len(loader) // accum * accum
    for i, (x, y) in enumerate(loader):
        if i >= usable:
            break
        with torch.autocast("cuda", dtype=amp_dtype):
            loss = criterion(model(x), y)
        update = (i + 1) % accum == 0
        norm = loss_scaler(loss / accum, optimizer, clip_grad=clip, parameters=model.parameters(), need_update=update)
        if update:
            optimizer.zero_grad()
            print(f"iter {i} loss {loss.item():.4f} norm {norm:.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="/data/imagenet")
    parser.add_argument("--amp-dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--accum", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    amp_dtype = getattr(torch, args.amp_dtype)
    model = timm.create_model("convnext_tiny", num_classes=1000).cuda()
    loader = create_loader(create_dataset("", args.data, split="train", is_training=True), (3, 224, 224), 128,
                           is_training=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    loss_scaler = NativeScaler(enabled=amp_dtype is torch.float16)
    start = 0
    if args.resume:
        ckpt = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        scheduler.load_state_dict(ckpt["scheduler"])
        loss_scaler.load_state_dict(ckpt[NativeScaler.state_dict_key])
        start = ckpt["epoch"] + 1
    for epoch in range(start, args.epochs):
        train_one_epoch(model, loader, nn.CrossEntropyLoss(), optimizer, loss_scaler, amp_dtype, args.accum, 1.0)
        scheduler.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch,
                    "scheduler": scheduler.state_dict(),
                    NativeScaler.state_dict_key: loss_scaler.state_dict()}, "last.pt")


if __name__ == "__main__":
    main()
