# why correct: the summed token loss is multiplied by accumulation steps and processes on purpose: accelerator.backward and DDP divide by them again, leaving a true mean over all tokens of the window
import contextlib

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_scheduler

ACCUMULATE = 8


def summed_nll(logits, labels):
    return F.cross_entropy(
        logits[:, :-1].float().reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum"
    )


def main(dataset, collate, name="HuggingFaceTB/SmolLM2-360M", epochs=1):
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATE)
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    loader = DataLoader(dataset, batch_size=2, shuffle=True, collate_fn=collate, drop_last=True)
    sched = get_scheduler("cosine", optimizer, num_warmup_steps=20, num_training_steps=epochs * len(loader) // ACCUMULATE)
    model, optimizer, loader, sched = accelerator.prepare(model, optimizer, loader, sched)

    model.train()
    for epoch in range(epochs):
        stream = iter(loader)
        left = len(loader) // ACCUMULATE
        for update in range(left):
            window = [next(stream) for _ in range(ACCUMULATE)]
            tokens = sum((b["labels"][:, 1:] != -100).sum() for b in window)
            tokens = accelerator.gather(tokens.reshape(1)).sum()

            report = 0.0
            for i, batch in enumerate(window):
                last = i == ACCUMULATE - 1
                with contextlib.nullcontext() if last else accelerator.no_sync(model):
                    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                    nll = summed_nll(logits, batch["labels"]) / tokens
                    accelerator.backward(nll * accelerator.gradient_accumulation_steps * accelerator.num_processes)
                report += nll.detach()
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            sched.step()
            optimizer.zero_grad()
            if update % 10 == 0:
                accelerator.print(update, accelerator.reduce(report, "sum").item())

