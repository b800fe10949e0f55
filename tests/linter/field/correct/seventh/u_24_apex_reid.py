# why correct: amp.initialize precedes the DDP wrapper, backward runs inside scale_loss, and the master parameters are clipped after it has unscaled them
import argparse

import torch
import torch.distributed as dist
from apex import amp
from apex.parallel import DistributedDataParallel as ApexDDP
from torch import nn


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--local_rank", type=int, default=0)
    p.add_argument("--opt-level", default="O2")
    p.add_argument("--epochs", type=int, default=120)
    p.add_argument("--lr", type=float, default=3.5e-4)
    p.add_argument("--resume", default="")
    return p.parse_args()


def prepare(net, args):
    net = net.cuda()
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr, weight_decay=5e-4)
    net, optimizer = amp.initialize(net, optimizer, opt_level=args.opt_level, loss_scale="dynamic")
    if args.resume:
        ck = torch.load(args.resume, map_location="cuda")
        net.load_state_dict(ck["net"])
        optimizer.load_state_dict(ck["optimizer"])
        amp.load_state_dict(ck["amp"])
    return ApexDDP(net, delay_allreduce=True), optimizer


def backward_and_step(loss, optimizer, max_norm):
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)
    optimizer.step()


def train_epoch(net, loader, optimizer, id_loss, tri_loss):
    net.train()
    for image, pid in loader:
        image, pid = image.cuda(non_blocking=True), pid.cuda(non_blocking=True)
        logits, feats = net(image)
        loss = id_loss(logits.float(), pid) + tri_loss(feats.float(), pid)
        backward_and_step(loss, optimizer, 5.0)
    return loss.item()


def main():
    args = parse()
    torch.cuda.set_device(args.local_rank)
    dist.init_process_group("nccl", init_method="env://")

    from reid.data import pk_loader
    from reid.losses import BatchHardTriplet
    from reid.model import build

    net, optimizer = prepare(build(), args)
    loader, sampler = pk_loader(args)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(net, loader, optimizer, nn.CrossEntropyLoss(label_smoothing=0.1), BatchHardTriplet(0.3))
        if args.local_rank == 0:
            print(epoch, loss)
            torch.save(
                {"net": net.module.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()},
                "reid.pt",
            )


if __name__ == "__main__":
    main()
