# source: https://github.com/Lightning-AI/pytorch-lightning/issues/2556
# mistake: under apex O2 the optimizer steps the fp32 master copies, but the clipping touches only the model's fp16 parameters, so the gradients that are applied are never clipped.
# severity: error
import argparse
import os
import random

import numpy as np
import torch
from apex import amp
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from tqdm import tqdm
from transformers import AdamW, BertForTokenClassification, BertTokenizer, get_linear_schedule_with_warmup

from ner_utils import NERDataset, span_f1


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data_dir", required=True)
    ap.add_argument("--output_dir", required=True)
    ap.add_argument("--model", default="bert-base-cased")
    ap.add_argument("--train_batch", type=int, default=32)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--learning_rate", type=float, default=3e-5)
    ap.add_argument("--max_grad_norm", type=float, default=1.0)
    ap.add_argument("--warmup_ratio", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=42)
    return ap.parse_args()


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


def evaluate(model, dataset, device):
    loader = DataLoader(dataset, sampler=SequentialSampler(dataset), batch_size=64)
    model.eval()
    preds, golds = [], []
    for ids, mask, tags in loader:
        with torch.no_grad():
            scores = model(ids.to(device), attention_mask=mask.to(device))[0]
        preds.extend(scores.argmax(-1).cpu().tolist())
        golds.extend(tags.tolist())
    return span_f1(preds, golds)


def main():
    args = parse()
    set_seed(args.seed)
    device = torch.device("cuda")
    tok = BertTokenizer.from_pretrained(args.model)
    train_set = NERDataset(args.data_dir, "train", tok)
    dev_set = NERDataset(args.data_dir, "dev", tok)
    loader = DataLoader(train_set, sampler=RandomSampler(train_set), batch_size=args.train_batch)

    model = BertForTokenClassification.from_pretrained(args.model, num_labels=len(train_set.tags)).to(device)
    skip = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not n.endswith(skip)], "weight_decay": 0.01},
        {"params": [p for n, p in named if n.endswith(skip)], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=args.learning_rate, eps=1e-8)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic")
    total = len(loader) * args.epochs
    scheduler = get_linear_schedule_with_warmup(optimizer, int(total * args.warmup_ratio), total)

    best = -1.0
    for epoch in range(args.epochs):
        model.train()
        bar = tqdm(loader, desc="epoch %d" % epoch)
        for ids, mask, tags in bar:
            loss = model(ids.to(device), attention_mask=mask.to(device), labels=tags.to(device))[0]
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)  # <- here
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            bar.set_postfix(loss="%.3f" % loss.item())
        f1 = evaluate(model, dev_set, device)
        print("epoch %d dev f1 %.4f" % (epoch, f1))
        if f1 > best:
            best = f1
            os.makedirs(args.output_dir, exist_ok=True)
            model.save_pretrained(args.output_dir)
            tok.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
