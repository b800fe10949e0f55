# style of: NVIDIA/apex:examples/imagenet/main_amp.py
# torch: any
import argparse

import torch
import torch.nn as nn
import torchvision.models as models
from apex import amp
from apex.parallel import DistributedDataParallel as DDP


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--epochs", default=90, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--max-norm", default=5.0, type=float)
    parser.add_argument("--resume", default="")
    parser.add_argument("--opt-level", default="O1", type=str)
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    parser.add_argument("--distributed", action="store_true")
    return parser.parse_args()


def main(args, train_loader):
    model = models.__dict__[args.arch]().cuda()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    # models and optimizers first, then the wrapper
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if args.distributed:
        model = DDP(model, delay_allreduce=True)
    criterion = nn.CrossEntropyLoss().cuda()
    start_epoch = 0

    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])
        start_epoch = checkpoint["epoch"]

    for epoch in range(start_epoch, args.epochs):
        train(train_loader, model, criterion, optimizer, args)
        torch.save(
            {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "amp": amp.state_dict(),
            },
            "checkpoint.pth.tar",
        )


def train(loader, model, criterion, optimizer, args):
    model.train()
    for images, target in loader:
        images, target = images.cuda(non_blocking=True), target.cuda(non_blocking=True)
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        # leaving the context has unscaled the master gradients
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_norm)
        optimizer.step()


if __name__ == "__main__":
    from loaders import imagenet_loader

    cli = parse()
    main(cli, imagenet_loader(cli))
