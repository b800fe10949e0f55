# source: Lightning-AI/pytorch-lightning issue #2556
# mistake: with apex O2 the clipping is applied to model.parameters(), the fp16 copies, and not to amp.master_params(optimizer), so the gradients used by the optimizer are never clipped
# severity: error
from __future__ import print_function

import argparse
import random

import numpy as np
import torch
from apex import amp
from apex.optimizers import FusedAdam
from torch.utils.data import DataLoader, RandomSampler
from transformers import BartForConditionalGeneration, BartTokenizer, get_linear_schedule_with_warmup


def seed_all(s):
    random.seed(s)
    np.random.seed(s)
    torch.manual_seed(s)


def collator(tok, src_len, tgt_len):
    def fn(rows):
        enc = tok([r["article"] for r in rows], max_length=src_len, truncation=True, padding=True,
                  return_tensors="pt")
        lab = tok([r["highlights"] for r in rows], max_length=tgt_len, truncation=True, padding=True,
                  return_tensors="pt").input_ids
        lab[lab == tok.pad_token_id] = -100
        enc["labels"] = lab
        return enc

    return fn


def train(args, rows, model, tok):
    loader = DataLoader(rows, sampler=RandomSampler(rows), batch_size=args.batch, drop_last=True,
                        collate_fn=collator(tok, 512, 120))
    no_decay = ("bias", "layer_norm.weight", "layernorm_embedding.weight")
    groups = [
        {"params": [p for n, p in model.named_parameters() if not n.endswith(no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    optimizer = FusedAdam(groups, lr=args.lr)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", keep_batchnorm_fp32=None, loss_scale="dynamic")
    total = args.epochs * len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, int(0.06 * total), total)

    model.zero_grad()
    for epoch in range(args.epochs):
        model.train()
        tot = 0.0
        for step, batch in enumerate(loader):
            batch = {k: v.cuda() for k, v in batch.items()}
            loss = model(**batch)[0]
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)  # <- here
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            tot += loss.item()
            if step % 200 == 199:
                print("epoch {} step {} loss {:.3f}".format(epoch, step + 1, tot / (step + 1)))
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict(),
                    "scheduler": scheduler.state_dict()}, "{}/epoch{}.pt".format(args.out, epoch))


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="facebook/bart-base")
    ap.add_argument("--lr", type=float, default=3e-5)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--max_grad_norm", type=float, default=1.0)
    ap.add_argument("--out", default="out")
    args = ap.parse_args()
    seed_all(1)
    from cnn_dm import read_rows

    tok = BartTokenizer.from_pretrained(args.model)
    train(args, read_rows("train"), BartForConditionalGeneration.from_pretrained(args.model).cuda(), tok)
