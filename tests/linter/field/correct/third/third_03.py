import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


class LineDataset(torch.utils.data.Dataset):
    def __init__(self, path, tokenizer, max_len):
        with open(path) as f:
            self.lines = [line.strip() for line in f if line.strip()]
        self.tokenizer, self.max_len = tokenizer, max_len

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        return self.tokenizer(self.lines[i], truncation=True, max_length=self.max_len,
                              padding="max_length", return_tensors="pt")


class MasterWeights:
    """bf16 working copy for forward/backward, fp32 copy for the optimizer."""

    def __init__(self, model, lr):
        self.work = [p for p in model.parameters() if p.requires_grad]
        self.master = [torch.nn.Parameter(p.detach().clone().float()) for p in self.work]
        self.optimizer = torch.optim.AdamW(self.master, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)

    def step(self, max_norm):
        for w, m in zip(self.work, self.master):
            m.grad = None if w.grad is None else w.grad.float()
            w.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.master, max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for w, m in zip(self.work, self.master):
                w.copy_(m)
        return norm


def lm_loss(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="EleutherAI/pythia-1b")
    parser.add_argument("--train_file", default="train.txt")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.bfloat16).cuda()
    model.gradient_checkpointing_enable()
    weights = MasterWeights(model, args.lr)
    loader = DataLoader(LineDataset(args.train_file, tokenizer, 512), 8, shuffle=True, drop_last=True)
    model.train()
    for epoch in range(args.epochs):
        for step, batch in enumerate(loader):
            batch = {k: v.squeeze(1).cuda() for k, v in batch.items()}
            loss = lm_loss(model, batch)
            loss.backward()
            norm = weights.step(max_norm=1.0)
            if step % 20 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} norm {norm.item():.3f}")
    model.save_pretrained("out")
    tokenizer.save_pretrained("out")


if __name__ == "__main__":
    main()
