# re-expressed from github.com/facebookresearch/co-tracker pull 101: checkpoints for resuming held model and optimizer but not the loss scaler, the curves broke after every restart
import argparse
import math
import sys
from pathlib import Path

import timm
import torch
import torch.nn as nn
from timm.data import create_transform
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, NativeScaler
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder


class MaskedPixelModel(nn.Module):
    def __init__(self, backbone="vit_base_patch16_224", ratio=0.6, patch=16):
        super().__init__()
        self.enc = timm.create_model(backbone, num_classes=0, global_pool="")
        self.mask_token = nn.Parameter(torch.zeros(1, 1, self.enc.embed_dim))
        self.head = nn.Linear(self.enc.embed_dim, patch * patch * 3)
        self.ratio, self.patch = ratio, patch

    def patchify(self, x):
        return nn.functional.unfold(x, self.patch, stride=self.patch).transpose(1, 2)

    def forward(self, x):
        tok = self.enc.patch_embed(x)
        mask = torch.rand(tok.shape[:2], device=x.device) < self.ratio
        tok = torch.where(mask[..., None], self.mask_token.to(tok.dtype), tok)
        tok = self.enc.norm_pre(self.enc._pos_embed(tok))
        tok = self.enc.norm(self.enc.blocks(tok))
        return self.head(tok[:, self.enc.num_prefix_tokens:]), mask


def pixel_loss(model, images, pred, mask):
    target = model.patchify(images)
    target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
    err = (pred.float() - target).abs().mean(-1)
    return (err * mask).sum() / mask.sum()


def save_state(path, model, optimizer, scheduler, epoch):
    torch.save(  # <- here
        {
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": scheduler.state_dict(),
            "epoch": epoch,
        },
        path,
    )


def restore(path, model, optimizer, scheduler):
    ckpt = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(ckpt["state_dict"])
    optimizer.load_state_dict(ckpt["optimizer"])
    scheduler.load_state_dict(ckpt["lr_scheduler"])
    return ckpt["epoch"] + 1


def train_one_epoch(model, loader, optimizer, loss_scaler, scheduler, epoch, args):
    model.train()
    losses = AverageMeter()
    optimizer.zero_grad()
    for i, (images, _) in enumerate(loader):
        images = images.cuda(non_blocking=True)
        with torch.amp.autocast("cuda", dtype=torch.float16):
            pred, mask = model(images)
        loss = pixel_loss(model, images, pred, mask)
        if not math.isfinite(loss.item()):
            sys.exit(f"loss is {loss.item()}, stopping")
        update = (i + 1) % args.accum == 0
        loss_scaler(loss / args.accum, optimizer, clip_grad=args.clip, parameters=model.parameters(), need_update=update)
        if update:
            optimizer.zero_grad()
            scheduler.step_update(epoch * len(loader) // args.accum + (i + 1) // args.accum)
        losses.update(loss.item(), images.size(0))
    return losses.avg


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="imagenet/train")
    ap.add_argument("--out", default="out/mim")
    ap.add_argument("--epochs", type=int, default=300)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--clip", type=float, default=3.0)
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    data = ImageFolder(args.data, create_transform(224, is_training=True, auto_augment=None))
    loader = DataLoader(data, 128, shuffle=True, num_workers=12, pin_memory=True, drop_last=True)
    model = MaskedPixelModel().cuda()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1.5e-4, weight_decay=0.05, betas=(0.9, 0.95))
    updates = args.epochs * len(loader) // args.accum
    scheduler = CosineLRScheduler(optimizer, t_initial=updates, warmup_t=updates // 20, t_in_epochs=False)
    loss_scaler = NativeScaler()
    start = restore(args.resume, model, optimizer, scheduler) if args.resume else 0
    for epoch in range(start, args.epochs):
        avg = train_one_epoch(model, loader, optimizer, loss_scaler, scheduler, epoch, args)
        print(f"epoch {epoch} loss {avg:.4f}")
        save_state(f"{args.out}/last.pth", model, optimizer, scheduler, epoch)


if __name__ == "__main__":
    main()
