# source: https://github.com/Lightning-AI/pytorch-lightning/issues/2556
# mistake: with apex O2 the half-precision model.parameters() are clipped instead of amp.master_params(optimizer), whose gradients are the ones the optimizer uses; nothing is clipped.
# severity: error
# torch: any (apex)
import argparse

import torch
import torch.nn as nn
from apex import amp
from torch.utils.data import DataLoader
from transformers import AdamW, BertForSequenceClassification

from glue import features_for


def train(args, model, loader, optimizer):
    model.train()
    for step, batch in enumerate(loader):
        batch = tuple(t.to(args.device) for t in batch)
        outputs = model(input_ids=batch[0], attention_mask=batch[1], labels=batch[2])
        loss = outputs[0]

        optimizer.zero_grad()
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)  # <- here
        optimizer.step()

        if step % args.logging_steps == 0:
            print(f"step {step} loss {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", default="mrpc")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--fp16_opt_level", default="O2")
    parser.add_argument("--max_grad_norm", default=1.0, type=float)
    parser.add_argument("--logging_steps", default=50, type=int)
    args = parser.parse_args()
    args.device = torch.device("cuda")

    model = BertForSequenceClassification.from_pretrained("bert-base-uncased").to(args.device)
    optimizer = AdamW(model.parameters(), lr=2e-5)
    if args.fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level)
    train(args, model, DataLoader(features_for(args.task), batch_size=32, shuffle=True), optimizer)


if __name__ == "__main__":
    main()
