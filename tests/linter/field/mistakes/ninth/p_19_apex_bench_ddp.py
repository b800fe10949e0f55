# source: ROCm/pytorch-micro-benchmarking#7
# mistake: the model is wrapped in DistributedDataParallel before apex's amp.initialize, which refuses wrapped models
# severity: error
import argparse
import time

import torch
import torch.distributed as dist
import torchvision
from apex import amp
from torch.nn.parallel import DistributedDataParallel


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--network", default="resnet50")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--iterations", type=int, default=20)
    p.add_argument("--local_rank", type=int, default=0)
    p.add_argument("--opt-level", default="O1", choices=["O1", "O2"])
    p.add_argument("--distributed", action="store_true")
    return p.parse_args()


def setup(args):
    torch.cuda.set_device(args.local_rank)
    if args.distributed:
        dist.init_process_group("nccl", init_method="env://")
    net = getattr(torchvision.models, args.network)(weights=None).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    if args.distributed:
        net = DistributedDataParallel(net, device_ids=[args.local_rank])  # <- here
    net, optimizer = amp.initialize(net, optimizer, opt_level=args.opt_level)  # <- here
    return net, optimizer


def one_pass(net, criterion, optimizer, x, y):
    loss = criterion(net(x), y)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def bench(args):
    net, optimizer = setup(args)
    criterion = torch.nn.CrossEntropyLoss().cuda()
    x = torch.randn(args.batch, 3, 224, 224, device="cuda")
    y = torch.randint(0, 1000, (args.batch,), device="cuda")
    net.train()
    for _ in range(5):
        one_pass(net, criterion, optimizer, x, y)
    torch.cuda.synchronize()
    t0 = time.time()
    for _ in range(args.iterations):
        one_pass(net, criterion, optimizer, x, y)
    torch.cuda.synchronize()
    dt = (time.time() - t0) / args.iterations
    if args.local_rank == 0:
        print(f"{args.network} {args.opt_level}: {args.batch / dt:.1f} images/s per device")


if __name__ == "__main__":
    bench(parse())
