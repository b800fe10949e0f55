# why correct: the engine itself divides by the accumulation steps, scales the fp16 loss, clips, steps and zeroes; the client only calls backward and step
import argparse
import json

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F


class TwoTower(nn.Module):
    def __init__(self, items, dim=512):
        super().__init__()
        self.items = nn.Embedding(items, dim, padding_idx=0)
        layer = nn.TransformerEncoderLayer(dim, 8, 2048, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 6)
        self.norm = nn.LayerNorm(dim)

    def forward(self, history, target):
        pad = history.eq(0)
        h = self.body(self.items(history), src_key_padding_mask=pad)
        keep = (~pad).unsqueeze(-1).to(h.dtype)
        user = self.norm((h * keep).sum(1) / keep.sum(1).clamp(min=1))
        return user, self.items(target)


def config(args):
    return {
        "train_micro_batch_size_per_gpu": args.micro,
        "gradient_accumulation_steps": args.accum,
        "gradient_clipping": 1.0,
        "steps_per_print": 100,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_num_steps": 500, "total_num_steps": args.updates, "warmup_max_lr": args.lr}},
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 14},
        "zero_optimization": {"stage": 1},
    }


def main(dataset):
    p = argparse.ArgumentParser()
    p.add_argument("--micro", type=int, default=64)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--updates", type=int, default=20_000)
    p.add_argument("--items", type=int, required=True)
    p.add_argument("--local_rank", type=int, default=-1)
    p.add_argument("--resume", action="store_true")
    args = p.parse_args()

    model = TwoTower(args.items)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=dataset, config=config(args))
    if args.resume:
        engine.load_checkpoint("ckpt")
    if engine.global_rank == 0:
        print(json.dumps(config(args), indent=2))

    while engine.global_steps < args.updates:
        for history, target in loader:
            user, item = engine(history.to(engine.device), target.to(engine.device))
            sims = user.float() @ item.float().t() / 512 ** 0.5
            loss = F.cross_entropy(sims, torch.arange(len(sims), device=sims.device))
            engine.backward(loss)
            engine.step()
            if engine.global_steps >= args.updates:
                break
        engine.save_checkpoint("ckpt")
