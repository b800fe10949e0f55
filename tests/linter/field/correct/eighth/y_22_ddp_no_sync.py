# why correct: micro-batches before the last run in no_sync, all are scaled with the same factor since update() comes once per group, and unscale/clip come after the synchronizing backward.
import argparse
import itertools
import os
from contextlib import ExitStack

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from chem.data import SmilesPairs, collate
from chem.model import ReactionTransformer


def groups(iterable, size):
    it = iter(iterable)
    while True:
        chunk = list(itertools.islice(it, size))
        if not chunk:
            return
        yield chunk


class Stepper:
    def __init__(self, ddp, optimizer, scaler, clip):
        self.ddp, self.optimizer, self.scaler, self.clip = ddp, optimizer, scaler, clip

    def micro(self, batch, tokens, sync):
        with ExitStack() as stack:
            if not sync:
                stack.enter_context(self.ddp.no_sync())
            with torch.cuda.amp.autocast():
                logits = self.ddp(batch["src"], batch["tgt_in"])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["tgt_out"].flatten(),
                                               ignore_index=0, reduction="sum")
            self.scaler.scale(loss * dist.get_world_size() / tokens).backward()
        return loss.detach()

    def __call__(self, chunk, device):
        chunk = [{k: v.to(device, non_blocking=True) for k, v in b.items()} for b in chunk]
        tokens = sum((b["tgt_out"] != 0).sum() for b in chunk)
        dist.all_reduce(tokens)
        self.optimizer.zero_grad(set_to_none=True)
        total = sum(self.micro(b, tokens, sync=i + 1 == len(chunk)) for i, b in enumerate(chunk))
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.ddp.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return total * dist.get_world_size() / tokens


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("data")
    ap.add_argument("--accumulate", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=40)
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--out", default="rxn.pt")
    a = ap.parse_args()

    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    data = SmilesPairs(a.data, "train")
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, 64, sampler=sampler, collate_fn=collate, num_workers=4, drop_last=True)
    ddp = DistributedDataParallel(ReactionTransformer(len(data.vocab)).to(device), device_ids=[local])
    optimizer = torch.optim.Adam(ddp.parameters(), lr=2e-4, betas=(0.9, 0.998))
    plan = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    scaler = torch.cuda.amp.GradScaler()
    stateful = dict(model=ddp.module, optimizer=optimizer, plan=plan, scaler=scaler)
    start = 0
    if os.path.exists(a.out):
        blob = torch.load(a.out, map_location=device)
        for k, v in stateful.items():
            v.load_state_dict(blob[k])
        start = blob["epoch"] + 1

    stepper = Stepper(ddp, optimizer, scaler, a.clip)
    for epoch in range(start, a.epochs):
        ddp.train()
        sampler.set_epoch(epoch)
        for i, chunk in enumerate(groups(loader, a.accumulate)):
            loss = stepper(chunk, device)
            if i % 100 == 0 and local == 0:
                print(f"{epoch}:{i} {loss.item():.4f}")
        plan.step()
        if dist.get_rank() == 0:
            torch.save({**{k: v.state_dict() for k, v in stateful.items()}, "epoch": epoch}, a.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
