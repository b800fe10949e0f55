# source: huggingface/trl PR #595 (fixed in #546)
# mistake: under Accelerate fp16 the gradients are clipped with torch's function instead of accelerator.clip_grad_norm_, i.e. while they are still scaled
# severity: error
import random

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_cosine_schedule_with_warmup

NAME = "microsoft/deberta-v3-base"
MAX_NORM = 0.5
EPOCHS = 3


def tokenise(tok):
    def inner(rows):
        win = tok([r["prompt"] + r["chosen"] for r in rows], truncation=True, max_length=512, padding=True,
                  return_tensors="pt")
        lose = tok([r["prompt"] + r["rejected"] for r in rows], truncation=True, max_length=512, padding=True,
                   return_tensors="pt")
        return win, lose

    return inner


def ranking_loss(win, lose):
    return -torch.nn.functional.logsigmoid(win.float() - lose.float()).mean()


def evaluate(accelerator, model, loader):
    model.eval()
    right = []
    for win, lose in loader:
        with torch.no_grad():
            ok = model(**win).logits > model(**lose).logits
        right.append(accelerator.gather_for_metrics(ok.float()))
    model.train()
    return torch.cat(right).mean().item()


def main():
    set_seed(17)
    accelerator = Accelerator(mixed_precision="fp16", log_with="tensorboard", project_dir="runs/reward")
    tok = AutoTokenizer.from_pretrained(NAME)
    model = AutoModelForSequenceClassification.from_pretrained(NAME, num_labels=1)
    from prefs import load_pairs

    rows = load_pairs()
    random.shuffle(rows)
    cut = len(rows) // 20
    train = DataLoader(rows[cut:], batch_size=16, shuffle=True, collate_fn=tokenise(tok))
    held = DataLoader(rows[:cut], batch_size=32, collate_fn=tokenise(tok))
    optimizer = torch.optim.AdamW(model.parameters(), lr=9e-6)
    total = EPOCHS * len(train)
    schedule = get_cosine_schedule_with_warmup(optimizer, total // 20, total)
    model, optimizer, train, held, schedule = accelerator.prepare(model, optimizer, train, held, schedule)
    accelerator.init_trackers("reward")

    step = 0
    for epoch in range(EPOCHS):
        for win, lose in train:
            loss = ranking_loss(model(**win).logits, model(**lose).logits)
            accelerator.backward(loss)  # <- here
            clip_grad_norm_(model.parameters(), MAX_NORM)  # <- here
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % 20 == 0:
                accelerator.log({"loss": loss.item()}, step=step)
        acc = evaluate(accelerator, model, held)
        accelerator.print(f"epoch {epoch}: held-out accuracy {acc:.3f}")
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained("reward-model", save_function=accelerator.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()
