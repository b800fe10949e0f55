# why correct: amp.initialize comes before the DDP wrapper, clipping after the scale_loss block uses amp.master_params, and amp.state_dict is saved
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from apex import amp
from apex.parallel import DistributedDataParallel as ApexDDP
from apex.parallel import convert_syncbn_model


class Tacotronish(nn.Module):
    def __init__(self, symbols=150, dim=512, mels=80):
        super().__init__()
        self.emb = nn.Embedding(symbols, dim)
        self.conv = nn.Sequential(nn.Conv1d(dim, dim, 5, padding=2), nn.BatchNorm1d(dim), nn.ReLU())
        self.enc = nn.LSTM(dim, dim // 2, bidirectional=True, batch_first=True)
        self.dec = nn.LSTM(dim + mels, dim, batch_first=True)
        self.attn = nn.MultiheadAttention(dim, 1, batch_first=True)
        self.q = nn.Linear(mels, dim)
        self.out = nn.Linear(dim, mels)

    def forward(self, text, prev):
        h, _ = self.enc(self.conv(self.emb(text).transpose(1, 2)).transpose(1, 2))
        ctx, _ = self.attn(self.q(prev), h, h, need_weights=False)
        y, _ = self.dec(torch.cat([ctx, prev.to(ctx.dtype)], -1))
        return self.out(y)


def save(path, model, optimizer, it):
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                "amp": amp.state_dict(), "iteration": it}, path)


def main(make_loader):
    p = argparse.ArgumentParser()
    p.add_argument("--local_rank", type=int, default=0)
    p.add_argument("--opt-level", default="O1", choices=["O1", "O2"])
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--resume")
    args = p.parse_args()
    torch.cuda.set_device(args.local_rank)
    dist.init_process_group("nccl", init_method="env://")

    model = convert_syncbn_model(Tacotronish()).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    it = 0
    if args.resume:
        ck = torch.load(args.resume, map_location=f"cuda:{args.local_rank}")
        model.load_state_dict(ck["model"])
        optimizer.load_state_dict(ck["optimizer"])
        amp.load_state_dict(ck["amp"])
        it = ck["iteration"]
    model = ApexDDP(model)
    criterion = nn.MSELoss()
    for text, mel in make_loader(args.local_rank):
        text, mel = text.cuda(), mel.cuda()
        prev = torch.cat([torch.zeros_like(mel[:, :1]), mel[:, :-1]], 1)
        loss = criterion(model(text, prev).float(), mel)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
        optimizer.step()
        it += 1
        if it % 1000 == 0 and args.local_rank == 0:
            print(it, loss.item())
            save(f"taco_{it}.pt", model, optimizer, it)
