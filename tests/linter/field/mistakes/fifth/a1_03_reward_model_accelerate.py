# source: harubaru/waifu-diffusion issue #64 (see also huggingface/trl PR #595)
# mistake: under Accelerator(mixed_precision="fp16") the gradients are clipped with torch.nn.utils, which sees them multiplied by the loss scale
# severity: error
import argparse
import json

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModel, AutoTokenizer, get_cosine_schedule_with_warmup


class Preferences(Dataset):
    def __init__(self, path):
        with open(path) as fh:
            self.rows = [json.loads(line) for line in fh]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        r = self.rows[i]
        return r["prompt"] + r["chosen"], r["prompt"] + r["rejected"]


class Scorer(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.body = AutoModel.from_pretrained(name)
        self.value = nn.Linear(self.body.config.hidden_size, 1)

    def forward(self, input_ids, attention_mask):
        h = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        last = attention_mask.sum(1) - 1
        return self.value(h[torch.arange(h.size(0), device=h.device), last]).squeeze(-1)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--base", default="facebook/opt-350m")
    p.add_argument("--pairs", required=True)
    p.add_argument("--out", default="scorer")
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--grad-clip", type=float, default=1.0)
    a = p.parse_args()

    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=a.accum)
    set_seed(7)
    tok = AutoTokenizer.from_pretrained(a.base)

    def collate(rows):
        good, bad = zip(*rows)
        return tok(list(good) + list(bad), padding=True, truncation=True, max_length=512, return_tensors="pt")

    loader = DataLoader(Preferences(a.pairs), batch_size=4, shuffle=True, collate_fn=collate)
    model = Scorer(a.base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    total = a.epochs * len(loader) // a.accum
    schedule = get_cosine_schedule_with_warmup(optimizer, total // 20, total)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    model.train()
    for epoch in range(a.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                scores = model(batch["input_ids"], batch["attention_mask"])
                good, bad = scores.float().chunk(2)
                loss = -nn.functional.logsigmoid(good - bad).mean()
                accelerator.backward(loss)  # <- here
                if accelerator.sync_gradients:
                    nn.utils.clip_grad_norm_(model.parameters(), a.grad_clip)  # <- here
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: {loss.item():.4f}")
        accelerator.save_state(f"{a.out}/epoch{epoch}")


if __name__ == "__main__":
    main()
