# why correct: apex's own protocol: initialize before the parallel wrapper, backward inside scale_loss, clip amp.master_params, delay unscaling while accumulating, save amp.state_dict()
import argparse
import os

import torch
import torch.nn as nn
from apex import amp
from apex.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForQuestionAnswering, get_linear_schedule_with_warmup

from squad import SquadFeatures


def save(path, model, optimizer, sched, step):
    core = model.module if hasattr(model, "module") else model
    torch.save(
        {
            "model": core.state_dict(),
            "optimizer": optimizer.state_dict(),
            "sched": sched.state_dict(),
            "amp": amp.state_dict(),
            "step": step,
        },
        path,
    )


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--level", default="O1", choices=["O1", "O2"])
    p.add_argument("--accumulate", type=int, default=2)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--resume")
    a = p.parse_args()
    local = int(os.environ.get("LOCAL_RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    torch.cuda.set_device(local)
    if world > 1:
        torch.distributed.init_process_group("nccl")

    model = AutoModelForQuestionAnswering.from_pretrained("bert-large-uncased").cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=a.level, loss_scale="dynamic")
    data = SquadFeatures("train")
    sampler = DistributedSampler(data) if world > 1 else None
    loader = DataLoader(data, batch_size=8, sampler=sampler, shuffle=sampler is None, drop_last=True)
    total = len(loader) // a.accumulate * a.epochs
    sched = get_linear_schedule_with_warmup(optimizer, total // 10, total)
    step = 0
    if a.resume:
        blob = torch.load(a.resume, map_location="cpu")
        model.load_state_dict(blob["model"])
        optimizer.load_state_dict(blob["optimizer"])
        sched.load_state_dict(blob["sched"])
        amp.load_state_dict(blob["amp"])
        step = blob["step"]
    if world > 1:
        model = DistributedDataParallel(model, delay_allreduce=True)

    model.train()
    for epoch in range(a.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for i, batch in enumerate(loader):
            if i >= len(loader) - len(loader) % a.accumulate:
                break
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            boundary = (i + 1) % a.accumulate == 0
            loss = model(**batch)[0] / a.accumulate
            with amp.scale_loss(loss, optimizer, delay_unscale=not boundary) as scaled:
                scaled.backward()
            if boundary:
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
                optimizer.step()
                sched.step()
                optimizer.zero_grad()
                step += 1
        if local == 0:
            save(f"squad{epoch}.pt", model, optimizer, sched, step)


if __name__ == "__main__":
    main()
