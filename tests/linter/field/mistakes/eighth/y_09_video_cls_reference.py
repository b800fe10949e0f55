# source: https://github.com/pytorch/vision/pull/4874
# mistake: after the amp branch has already stepped through the scaler, a plain optimizer.step() common to both branches applies the same gradients a second time (and also after overflow).
# severity: error
import datetime
import time

import torch
import torch.utils.data
from torch import nn
from torchvision.models.video import r2plus1d_18

import presets
import utils


def train_one_epoch(model, criterion, optimizer, loader, device, epoch, args, scaler=None):
    model.train()
    meters = utils.MetricLogger(delimiter="  ")
    for clip, target in meters.log_every(loader, args.print_freq, f"Epoch: [{epoch}]"):
        tic = time.time()
        clip, target = clip.to(device), target.to(device)
        with torch.cuda.amp.autocast(enabled=scaler is not None):
            output = model(clip)
            loss = criterion(output, target)

        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            if args.clip_grad_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            scaler.step(optimizer)  # <- here
            scaler.update()
        else:
            loss.backward()
            if args.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()  # <- here

        acc1, acc5 = utils.accuracy(output, target, topk=(1, 5))
        meters.update(loss=loss.item(), acc1=acc1.item(), acc5=acc5.item())
        meters.meters["clips/s"].update(clip.shape[0] / (time.time() - tic))


@torch.inference_mode()
def evaluate(model, criterion, loader, device):
    model.eval()
    meters = utils.MetricLogger(delimiter="  ")
    for clip, target in meters.log_every(loader, 100, "Test:"):
        output = model(clip.to(device))
        loss = criterion(output, target.to(device))
        acc1, _ = utils.accuracy(output, target.to(device), topk=(1, 5))
        meters.update(loss=loss.item(), acc1=acc1.item())
    return meters.acc1.global_avg


def main(args):
    device = torch.device(args.device)
    train_set, test_set = presets.kinetics(args.data_path, args.clip_len)
    train_loader = torch.utils.data.DataLoader(train_set, args.batch_size, shuffle=True,
                                               num_workers=args.workers, pin_memory=True)
    test_loader = torch.utils.data.DataLoader(test_set, args.batch_size, num_workers=args.workers)
    model = r2plus1d_18(num_classes=args.classes).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, args.milestones, gamma=0.1)
    scaler = torch.cuda.amp.GradScaler() if args.amp else None

    if args.resume:
        ck = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(ck["model"])
        optimizer.load_state_dict(ck["optimizer"])
        scheduler.load_state_dict(ck["scheduler"])
        args.start_epoch = ck["epoch"] + 1
        if scaler is not None:
            scaler.load_state_dict(ck["scaler"])

    start = time.time()
    for epoch in range(args.start_epoch, args.epochs):
        train_one_epoch(model, criterion, optimizer, train_loader, device, epoch, args, scaler)
        scheduler.step()
        evaluate(model, criterion, test_loader, device)
        ck = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
              "scheduler": scheduler.state_dict(), "epoch": epoch}
        if scaler is not None:
            ck["scaler"] = scaler.state_dict()
        torch.save(ck, f"{args.output_dir}/model_{epoch}.pth")
    print("Training time", datetime.timedelta(seconds=int(time.time() - start)))


if __name__ == "__main__":
    main(utils.get_parser().parse_args())
