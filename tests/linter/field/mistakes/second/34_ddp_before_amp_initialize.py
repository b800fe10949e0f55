"""
# source: https://github.com/ROCm/pytorch-micro-benchmarking/pull/7
# mistake: the network is wrapped in DistributedDataParallel before apex amp.initialize, which raises RuntimeError for every level but O0.
# severity: error
# torch: any (apex)
"""
import argparse
import time

import torch
import torchvision
from apex import amp


def forwardbackward(inp, optimizer, network, target, amp_opt_level):
    optimizer.zero_grad()
    out = network(inp)
    loss = torch.nn.functional.cross_entropy(out, target)
    if amp_opt_level:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
    optimizer.step()


def build(params):
    network = getattr(torchvision.models, params.network)(weights=None).cuda()
    if params.distributed_dataparallel:
        torch.cuda.set_device(params.local_rank)
        torch.distributed.init_process_group(backend="nccl")
        network = torch.nn.parallel.DistributedDataParallel(network, device_ids=[params.local_rank])  # <- here
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    if params.amp_opt_level:
        network, optimizer = amp.initialize(network, optimizer, opt_level=f"O{params.amp_opt_level}")  # <- here
    return network, optimizer


def run_benchmarking(params):
    network, optimizer = build(params)
    network.train()
    batch = params.batch_size
    inp = torch.randn(batch, 3, 224, 224, device="cuda")
    target = torch.randint(0, 1000, (batch,), device="cuda")

    for _ in range(5):
        forwardbackward(inp, optimizer, network, target, params.amp_opt_level)
    torch.cuda.synchronize()

    start = time.time()
    for _ in range(params.iterations):
        forwardbackward(inp, optimizer, network, target, params.amp_opt_level)
    torch.cuda.synchronize()
    per_batch = (time.time() - start) / params.iterations
    print(f"{params.network} O{params.amp_opt_level}: {per_batch:.4f} s per batch, {batch / per_batch:.1f} img/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--amp-opt-level", type=int, default=0, choices=[0, 1, 2])
    parser.add_argument("--distributed_dataparallel", action="store_true")
    parser.add_argument("--local_rank", type=int, default=0)
    run_benchmarking(parser.parse_args())
