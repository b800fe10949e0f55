# source: deepspeedai/DeepSpeed issue #7439 (also #776)
# mistake: the loss is divided by the number of accumulation steps although DeepSpeed's engine.backward already does so, which makes the accumulated gradient too small by that factor
# severity: error
import argparse
import json
import pathlib

import deepspeed
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

ACCUM = 8
DS = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": ACCUM,
    "gradient_clipping": 1.0,
    "steps_per_print": 100,
    "fp16": {"enabled": True, "initial_scale_power": 14, "loss_scale_window": 500, "hysteresis": 2},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.999], "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupDecayLR",
                  "params": {"warmup_num_steps": 300, "total_num_steps": 12000, "warmup_max_lr": 3e-5}},
}


class Minutes(Dataset):
    def __init__(self, path, tok):
        self.rows = [json.loads(l) for l in pathlib.Path(path).read_text().splitlines()]
        self.tok = tok

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]

    def collate(self, rows):
        x = self.tok([r["minutes"] for r in rows], truncation=True, max_length=1024,
                     padding=True, return_tensors="pt")
        y = self.tok(text_target=[r["summary"] for r in rows], truncation=True, max_length=160,
                     padding=True, return_tensors="pt").input_ids
        x["labels"] = y.masked_fill(y == self.tok.pad_token_id, -100)
        return x


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--train", required=True)
    p.add_argument("--model", default="facebook/bart-large")
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--out", default="out/minutes")
    p.add_argument("--local_rank", type=int, default=-1)
    return p.parse_args()


def main():
    args = parse()
    deepspeed.init_distributed()
    tok = AutoTokenizer.from_pretrained(args.model)
    net = AutoModelForSeq2SeqLM.from_pretrained(args.model)
    data = Minutes(args.train, tok)
    engine, _, loader, _ = deepspeed.initialize(
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=data,
        collate_fn=data.collate,
        config=DS,
    )

    for epoch in range(args.epochs):
        engine.train()
        shown, count = 0.0, 0
        for batch in loader:
            batch = {k: v.to(engine.device) for k, v in batch.items()}
            loss = engine(**batch).loss
            shown += loss.item()
            count += 1
            loss = loss / engine.gradient_accumulation_steps()  # <- here
            engine.backward(loss)  # <- here
            engine.step()
            if engine.is_gradient_accumulation_boundary() and engine.global_rank == 0:
                if engine.global_steps % 25 == 0:
                    print(f"epoch {epoch} step {engine.global_steps} loss {shown / count:.3f} "
                          f"lr {engine.get_lr()[0]:.2e}")
        engine.save_checkpoint(args.out, tag=f"epoch{epoch}")


if __name__ == "__main__":
    main()
