# source: huggingface/accelerate issue #357 https://github.com/huggingface/accelerate/issues/357
# mistake: a private GradScaler is used on top of Accelerate's fp16 mode, whose prepared optimizer and backward already scale and unscale
# severity: error
import argparse

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch.cuda.amp import GradScaler
from torch.nn.functional import cross_entropy
from torchvision.models.segmentation import deeplabv3_resnet50

from landcover import tiles

logger = get_logger(__name__)


def arguments():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", required=True)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--epochs", type=int, default=30)
    return ap.parse_args()


@torch.no_grad()
def miou(acc, net, loader, classes):
    net.eval()
    inter = torch.zeros(classes, dtype=torch.float64, device=acc.device)
    union = torch.zeros_like(inter)
    for x, y in loader:
        pred, y = acc.gather_for_metrics((net(x)["out"].argmax(1), y))
        for c in range(classes):
            inter[c] += ((pred == c) & (y == c)).sum()
            union[c] += ((pred == c) | (y == c)).sum()
    net.train()
    return (inter / union.clamp(min=1)).mean().item()


def main():
    args = arguments()
    acc = Accelerator(mixed_precision="fp16")
    net = deeplabv3_resnet50(num_classes=9)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    train, val = tiles(args.root, args.batch)
    net, opt, train, val = acc.prepare(net, opt, train, val)
    scaler = GradScaler()  # <- here

    for epoch in range(args.epochs):
        for x, y in train:
            opt.zero_grad()
            out = net(x)
            loss = cross_entropy(out["out"], y, ignore_index=255)
            acc.backward(scaler.scale(loss))  # <- here
            scaler.step(opt)  # <- here
            scaler.update()  # <- here
        score = miou(acc, net, val, 9)
        logger.info("epoch %d miou %.4f", epoch, score)
        acc.save_state(f"ckpt_{epoch}")


if __name__ == "__main__":
    main()
