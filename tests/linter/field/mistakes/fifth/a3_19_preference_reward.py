# source: https://github.com/CambioML/pykoi/pull/69
# mistake: a model loaded in float16 is trained directly with Adam and its default eps of 1e-8, which is zero in float16, so weights whose squared gradient underflows become NaN
# severity: error
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

BASE = "facebook/opt-1.3b"
MAX_LEN = 512


def pairs(path):
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        yield row["prompt"] + row["chosen"], row["prompt"] + row["rejected"]


class Collator:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, rows):
        chosen, rejected = zip(*rows)
        return self.tokenizer(
            list(chosen) + list(rejected), truncation=True, max_length=MAX_LEN, padding=True, return_tensors="pt"
        )


def preference_loss(scores):
    good, bad = scores.float().squeeze(-1).chunk(2)
    return -F.logsigmoid(good - bad).mean(), (good > bad).float().mean()


def main(train_file, out_dir, epochs=1, batch=8, lr=1e-5):
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1, torch_dtype=torch.float16)  # <- here
    model.config.pad_token_id = tokenizer.pad_token_id
    model.cuda()
    model.train()

    loader = DataLoader(list(pairs(train_file)), batch, shuffle=True, collate_fn=Collator(tokenizer))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.95))  # <- here
    schedule = get_linear_schedule_with_warmup(optimizer, 100, epochs * len(loader))

    for epoch in range(epochs):
        for step, inputs in enumerate(loader):
            inputs = inputs.to("cuda")
            loss, accuracy = preference_loss(model(**inputs).logits)
            optimizer.zero_grad()
            loss.backward()  # <- here
            optimizer.step()  # <- here
            schedule.step()
            if step % 20 == 0:
                print(f"{epoch}/{step}: loss {loss.item():.4f} accuracy {accuracy.item():.3f}")

    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


if __name__ == "__main__":
    import fire

    fire.Fire(main)
