# source: https://discuss.pytorch.org/t/what-is-the-correct-way-of-computing-a-grad-penalty-using-amp/95827 (documented by pytorch/pytorch PR #44667)
# mistake: the gradients entering the penalty are those of the scaled loss and are never divided by the scale, so the penalty is multiplied by the square of the loss scale and changes whenever the scale does
# severity: error
import argparse

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup


def embed_forward(model, batch):
    table = model.get_input_embeddings()
    words = table(batch["input_ids"])
    out = model(inputs_embeds=words, attention_mask=batch["attention_mask"])
    return words, out.logits


def smoothness(grad, mask):
    grad = grad.float() * mask.unsqueeze(-1)
    return grad.pow(2).sum(dim=(1, 2)).mean()


def train_step(model, batch, optimizer, scaler, weight, limit):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        words, logits = embed_forward(model, batch)
        task = F.cross_entropy(logits, batch["labels"])

    scaled = scaler.scale(task)  # <- here
    (grad,) = torch.autograd.grad(scaled, words, create_graph=True)  # <- here
    penalty = smoothness(grad, batch["attention_mask"])  # <- here
    loss = task + weight * penalty

    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), limit)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return task.item(), penalty.item(), scaler.get_scale() >= before


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    good = n = 0
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        with torch.autocast("cuda", dtype=torch.float16):
            _, logits = embed_forward(model, batch)
        good += (logits.argmax(-1) == batch["labels"]).sum().item()
        n += len(logits)
    model.train()
    return good / n


def main(args, train_set, dev_set):
    device = torch.device("cuda")
    tok = AutoTokenizer.from_pretrained(args.encoder)

    def collate(rows):
        enc = tok([r["a"] for r in rows], [r["b"] for r in rows], padding=True, truncation=True, return_tensors="pt")
        enc["labels"] = torch.tensor([r["label"] for r in rows])
        return dict(enc)

    train = DataLoader(train_set, args.bs, shuffle=True, collate_fn=collate)
    dev = DataLoader(dev_set, args.bs * 2, collate_fn=collate)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.encoder, num_labels=3, attn_implementation="eager"
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    total = len(train) * args.epochs
    sched = get_linear_schedule_with_warmup(optimizer, total // 10, total)
    scaler = torch.amp.GradScaler("cuda")
    model.train()
    for epoch in range(args.epochs):
        for batch in train:
            batch = {k: v.to(device) for k, v in batch.items()}
            task, pen, stepped = train_step(model, batch, optimizer, scaler, args.weight, args.clip)
            if stepped:
                sched.step()
        print(f"epoch {epoch} task {task:.3f} penalty {pen:.3g} dev {accuracy(model, dev, device):.3f}")


def cli():
    p = argparse.ArgumentParser()
    p.add_argument("--encoder", default="roberta-base")
    p.add_argument("--bs", type=int, default=16)
    p.add_argument("--lr", type=float, default=1e-5)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--weight", type=float, default=0.5)
    p.add_argument("--clip", type=float, default=1.0)
    return p.parse_args()


if __name__ == "__main__":
    from datasets import load_dataset

    snli = load_dataset("csv", data_files={"train": "nli_train.csv", "dev": "nli_dev.csv"})
    main(cli(), snli["train"], snli["dev"])
