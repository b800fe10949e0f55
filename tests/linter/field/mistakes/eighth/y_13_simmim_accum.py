# source: https://github.com/microsoft/Swin-Transformer/issues/311
# mistake: unscale_() runs on every micro-batch while update() runs only at the accumulation boundary, so the second micro-batch raises "unscale_() has already been called".
# severity: error
import argparse
import logging
import os

import torch
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader

from mim.data import MaskedPatches
from mim.model import MaskedAutoEncoder

logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
log = logging.getLogger(__name__)


def norm_of(parameters):
    grads = [p.grad.detach() for p in parameters if p.grad is not None]
    return torch.stack([g.norm() for g in grads]).norm()


def train_epoch(args, model, loader, optimizer, scaler, epoch):
    model.train()
    optimizer.zero_grad()
    steps = len(loader) // args.accumulation_steps * args.accumulation_steps
    for idx, (img, mask) in enumerate(loader):
        if idx >= steps:
            break
        img = img.cuda(non_blocking=True)
        mask = mask.cuda(non_blocking=True)
        with autocast(enabled=args.amp):
            loss = model(img, mask)

        loss = loss / args.accumulation_steps
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # <- here
        if args.clip_grad:
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        else:
            grad_norm = norm_of(model.parameters())
        if (idx + 1) % args.accumulation_steps == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        if idx % args.print_freq == 0:
            log.info("epoch %d [%d/%d] loss %.4f norm %.3f scale %.0f", epoch, idx, len(loader),
                     loss.item() * args.accumulation_steps, float(grad_norm), scaler.get_scale())


def save(args, epoch, model, optimizer, plan, scaler):
    path = os.path.join(args.output, f"ckpt_{epoch}.pth")
    torch.save(dict(model=model.state_dict(), optimizer=optimizer.state_dict(), plan=plan.state_dict(),
                    scaler=scaler.state_dict(), epoch=epoch), path)


def restore(path, model, optimizer, plan, scaler):
    ck = torch.load(path, map_location="cpu")
    for key, obj in (("model", model), ("optimizer", optimizer), ("plan", plan), ("scaler", scaler)):
        obj.load_state_dict(ck[key])
    return ck["epoch"] + 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--output", default="out")
    ap.add_argument("--resume", default="")
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--epochs", type=int, default=100)
    ap.add_argument("--accumulation-steps", type=int, default=8)
    ap.add_argument("--clip-grad", type=float, default=5.0)
    ap.add_argument("--print-freq", type=int, default=50)
    ap.add_argument("--amp", action="store_true")
    args = ap.parse_args()

    loader = DataLoader(MaskedPatches(args.data), args.batch, shuffle=True, num_workers=10, drop_last=True)
    model = MaskedAutoEncoder().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.05)
    plan = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    scaler = GradScaler(enabled=args.amp)
    start = restore(args.resume, model, optimizer, plan, scaler) if args.resume else 0
    for epoch in range(start, args.epochs):
        train_epoch(args, model, loader, optimizer, scaler, epoch)
        plan.step()
        save(args, epoch, model, optimizer, plan, scaler)


if __name__ == "__main__":
    main()
