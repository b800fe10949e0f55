# why correct: the old apex way: scale_loss around backward, delay_unscale while accumulating, clipping amp.master_params, and amp's state in the checkpoint
import argparse
import os

import torch
from apex import amp
from apex.parallel import DistributedDataParallel
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import BertModel

from ranker.triples import AnswerTriples


class Ranker(nn.Module):
    def __init__(self, name="bert-base-uncased"):
        super().__init__()
        self.bert = BertModel.from_pretrained(name)
        self.score = nn.Linear(self.bert.config.hidden_size, 1)

    def forward(self, enc):
        return self.score(self.bert(**enc).last_hidden_state[:, 0]).squeeze(-1)


def hinge(good, bad, margin=1.0):
    return torch.relu(margin - good.float() + bad.float()).mean()


def to_gpu(enc):
    return {k: v.cuda(non_blocking=True) for k, v in enc.items()}


def save(path, model, optimizer, epoch):
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict(), "epoch": epoch}, path
    )


def resume(path, model, optimizer):
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    amp.load_state_dict(state["amp"])
    return state["epoch"] + 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("triples")
    ap.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    ap.add_argument("--opt_level", default="O2", choices=["O0", "O1", "O2"])
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=2e-5)
    ap.add_argument("--resume")
    args = ap.parse_args()
    torch.cuda.set_device(args.local_rank)
    torch.distributed.init_process_group("nccl")

    model = Ranker().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    first = resume(args.resume, model, optimizer) if args.resume else 0
    ddp = DistributedDataParallel(model, delay_allreduce=True)
    data = AnswerTriples(args.triples)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler, collate_fn=data.collate, num_workers=4, drop_last=True)

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        optimizer.zero_grad()
        whole = len(loader) // args.accum * args.accum
        for i, (question_good, question_bad) in enumerate(loader):
            if i == whole:
                break
            due = (i + 1) % args.accum == 0
            both = {k: torch.cat([v, question_bad[k]]) for k, v in question_good.items()}
            good, bad = ddp(to_gpu(both)).chunk(2)
            loss = hinge(good, bad) / args.accum
            with amp.scale_loss(loss, optimizer, delay_unscale=not due) as scaled:
                scaled.backward()
            if due:
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if args.local_rank == 0 and i % 200 == 0:
                print(epoch, i, loss.item() * args.accum)
        if args.local_rank == 0:
            save(f"ranker_{epoch}.pt", model, optimizer, epoch)


if __name__ == "__main__":
    main()
