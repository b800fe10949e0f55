# source: harubaru/waifu-diffusion issue #64
# mistake: with Accelerate in fp16 the gradients are still scaled when torch's own clip function gets them, so the norm limit is applied to the scaled values
# severity: error
import argparse
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import AutoProcessor, BlipForConditionalGeneration, get_cosine_schedule_with_warmup

from herbarium.data import SheetDataset


def parse():
    p = argparse.ArgumentParser("Fine-tune a captioner on herbarium sheets")
    p.add_argument("--root", required=True)
    p.add_argument("--base", default="Salesforce/blip-image-captioning-base")
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--bs", type=int, default=16)
    p.add_argument("--lr", type=float, default=2e-5)
    p.add_argument("--max_grad_norm", type=float, default=1.0)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--out", default="captioner")
    return p.parse_args()


def build_collate(processor):
    def collate(rows):
        enc = processor(
            images=[r["image"] for r in rows], text=[r["label"] for r in rows], padding=True, return_tensors="pt"
        )
        labels = enc["input_ids"].clone()
        labels[enc["attention_mask"] == 0] = -100
        enc["labels"] = labels
        return enc

    return collate


def main():
    args = parse()
    set_seed(17)
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=args.accum)
    processor = AutoProcessor.from_pretrained(args.base)
    model = BlipForConditionalGeneration.from_pretrained(args.base)
    loader = DataLoader(SheetDataset(args.root), args.bs, shuffle=True, collate_fn=build_collate(processor))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    updates = math.ceil(len(loader) / args.accum) * args.epochs
    schedule = get_cosine_schedule_with_warmup(optimizer, updates // 20, updates)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    for epoch in range(args.epochs):
        model.train()
        running = 0.0
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)  # <- here
                if accelerator.sync_gradients:
                    clip_grad_norm_(model.parameters(), args.max_grad_norm)  # <- here
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            running += loss.detach().float().item()
        accelerator.print(f"epoch {epoch}: {running / len(loader):.4f}")
        accelerator.save_state(f"{args.out}/epoch{epoch}")

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(args.out, save_function=accelerator.save)


if __name__ == "__main__":
    main()
