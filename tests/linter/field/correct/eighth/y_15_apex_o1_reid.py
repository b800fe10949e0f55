# why correct: amp.initialize precedes the parallel wrapper, clipping goes through amp.master_params, and amp.state_dict is saved and restored after initialize.
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from apex import amp
from apex.parallel import DistributedDataParallel, convert_syncbn_model
from torch.utils.data import DataLoader

from reid.data import IdentitySampler, VehicleSet
from reid.model import StrongBaseline
from reid.triplet import batch_hard


def options():
    p = argparse.ArgumentParser()
    p.add_argument("data")
    p.add_argument("--out", default="log/veri")
    p.add_argument("--opt-level", default="O1", choices=("O0", "O1"))
    p.add_argument("--epochs", type=int, default=120)
    p.add_argument("--ids", type=int, default=16)
    p.add_argument("--per-id", type=int, default=4)
    p.add_argument("--clip", type=float, default=10.0)
    p.add_argument("--resume", default="")
    p.add_argument("--local_rank", type=int, default=0)
    return p.parse_args()


def main():
    opt = options()
    torch.cuda.set_device(opt.local_rank)
    dist.init_process_group("nccl", init_method="env://")
    torch.backends.cudnn.benchmark = True

    data = VehicleSet(opt.data, "train")
    sampler = IdentitySampler(data, opt.ids, opt.per_id, rank=dist.get_rank(), world=dist.get_world_size())
    loader = DataLoader(data, batch_size=opt.ids * opt.per_id, sampler=sampler, num_workers=6, drop_last=True)

    net = convert_syncbn_model(StrongBaseline(data.num_ids)).cuda()
    optimizer = torch.optim.Adam(net.parameters(), lr=3.5e-4, weight_decay=5e-4)
    net, optimizer = amp.initialize(net, optimizer, opt_level=opt.opt_level)
    net = DistributedDataParallel(net, delay_allreduce=True)
    plan = torch.optim.lr_scheduler.MultiStepLR(optimizer, [40, 70], 0.1)
    identity = nn.CrossEntropyLoss()

    first = 0
    if opt.resume:
        ck = torch.load(opt.resume, map_location=lambda storage, loc: storage.cuda(opt.local_rank))
        net.module.load_state_dict(ck["net"])
        optimizer.load_state_dict(ck["optimizer"])
        plan.load_state_dict(ck["plan"])
        amp.load_state_dict(ck["amp"])
        first = ck["epoch"] + 1

    for epoch in range(first, opt.epochs):
        net.train()
        sampler.set_epoch(epoch)
        for it, (img, pid) in enumerate(loader):
            img, pid = img.cuda(non_blocking=True), pid.cuda(non_blocking=True)
            score, feat = net(img)
            loss = identity(score.float(), pid) + batch_hard(feat.float(), pid, margin=0.3)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), opt.clip)
            optimizer.step()
            if it % 50 == 0 and dist.get_rank() == 0:
                print("epoch %3d it %4d loss %.3f" % (epoch, it, loss.item()))
        plan.step()
        if dist.get_rank() == 0 and (epoch + 1) % 10 == 0:
            torch.save({
                "net": net.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "plan": plan.state_dict(),
                "amp": amp.state_dict(),
                "epoch": epoch,
            }, os.path.join(opt.out, "epoch_%03d.pth" % (epoch + 1)))


if __name__ == "__main__":
    main()
