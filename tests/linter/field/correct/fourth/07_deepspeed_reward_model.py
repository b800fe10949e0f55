import argparse
import json

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import AutoModel, AutoTokenizer

ENGINE = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 14, "loss_scale_window": 500, "hysteresis": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 9e-6, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 9e-6}},
}


class RewardModel(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.backbone = AutoModel.from_pretrained(name)
        self.value = nn.Linear(self.backbone.config.hidden_size, 1, bias=False)

    def forward(self, ids, mask, side):
        h = self.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
        last = mask.sum(1) - 1
        pooled = h[torch.arange(h.size(0), device=h.device), last]
        pooled = torch.cat([pooled[:, :-4], side], dim=-1)
        return self.value(pooled).squeeze(-1)


class Comparisons(Dataset):
    def __init__(self, path, tok, max_len=1024):
        self.rows = [json.loads(x) for x in open(path, encoding="utf-8")]
        self.tok, self.max_len = tok, max_len

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]

    def collate(self, rows):
        texts = [r["prompt"] + r["chosen"] for r in rows] + [r["prompt"] + r["rejected"] for r in rows]
        enc = self.tok(texts, truncation=True, max_length=self.max_len, padding=True, return_tensors="pt")
        side = torch.tensor([r["features"] for r in rows] * 2, dtype=torch.float32)
        return enc.input_ids, enc.attention_mask, side


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="facebook/opt-1.3b")
    ap.add_argument("--data", default="data/compare.jsonl")
    ap.add_argument("--out", default="out/reward")
    ap.add_argument("--epochs", type=int, default=1)
    ap.add_argument("--resume", action="store_true")
    ap.add_argument("--local_rank", type=int, default=-1)
    args = ap.parse_args()

    tok = AutoTokenizer.from_pretrained(args.model)
    model = RewardModel(args.model)
    data = Comparisons(args.data, tok)
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=data,
        collate_fn=data.collate,
        config=ENGINE,
    )
    first = 0
    if args.resume:
        _, extra = engine.load_checkpoint(args.out)
        first = extra["epoch"] + 1

    for epoch in range(first, args.epochs):
        engine.train()
        correct = seen = 0
        for i, (ids, mask, side) in enumerate(loader):
            ids, mask = ids.to(engine.device), mask.to(engine.device)
            side = side.to(engine.device).half()
            reward = engine(ids, mask, side)
            chosen, rejected = reward.float().chunk(2)
            loss = -F.logsigmoid(chosen - rejected).mean() + 1e-3 * (chosen + rejected).square().mean()
            engine.backward(loss)
            engine.step()
            correct += (chosen > rejected).sum().item()
            seen += chosen.numel()
            if engine.global_rank == 0 and (i + 1) % 40 == 0:
                print(
                    f"epoch {epoch} it {i + 1} loss {loss.item():.4f} acc {correct / seen:.3f} "
                    f"scale {optimizer.cur_scale if hasattr(optimizer, 'cur_scale') else optimizer.loss_scale}"
                )
        engine.save_checkpoint(args.out, tag=f"epoch{epoch}", client_state={"epoch": epoch})


if __name__ == "__main__":
    main()
