# source: huggingface/accelerate#1773
# mistake: the loss is divided by the number of accumulation steps although accelerator.backward already divides it, so gradients are accum times too small
# severity: error
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import (AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq,
                          get_linear_schedule_with_warmup)

HP = {
    "checkpoint": "facebook/bart-base",
    "lr": 3e-5,
    "batch": 4,
    "accum": 8,
    "epochs": 3,
    "warmup": 500,
    "clip": 1.0,
    "seed": 13,
}


def grouped(model, decay=0.01):
    no_decay = ("bias", "layer_norm.weight", "layernorm_embedding.weight")
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not n.endswith(no_decay)], "weight_decay": decay},
        {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
    ]


def run(dataset):
    set_seed(HP["seed"])
    accelerator = Accelerator(gradient_accumulation_steps=HP["accum"], mixed_precision="bf16", log_with=None)
    tok = AutoTokenizer.from_pretrained(HP["checkpoint"])
    model = AutoModelForSeq2SeqLM.from_pretrained(HP["checkpoint"])
    collate = DataCollatorForSeq2Seq(tok, model=model, label_pad_token_id=-100)
    loader = DataLoader(dataset, batch_size=HP["batch"], shuffle=True, collate_fn=collate)
    optimizer = torch.optim.SGD(grouped(model), lr=HP["lr"], momentum=0.9)
    total = HP["epochs"] * math.ceil(len(loader) / HP["accum"])
    schedule = get_linear_schedule_with_warmup(optimizer, HP["warmup"], total)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    done = 0
    for epoch in range(HP["epochs"]):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                loss = loss / HP["accum"]  # <- here
                accelerator.backward(loss)  # <- here
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), HP["clip"])
                    done += 1
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} updates {done}")
        accelerator.save_state(f"ckpt/epoch{epoch}")


if __name__ == "__main__":
    from datasets import load_from_disk

    run(load_from_disk("tokenised/train"))
