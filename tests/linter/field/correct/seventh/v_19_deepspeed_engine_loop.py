# why correct: the DeepSpeed engine owns loss scaling, clipping, accumulation and zeroing; the loop calls only engine.backward and engine.step
import argparse

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

from reviews import dataset

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 500, "warmup_max_lr": 2e-5}},
    "fp16": {"enabled": True, "initial_scale_power": 14, "loss_scale": 0, "loss_scale_window": 500},
    "zero_optimization": {"stage": 2},
}


class Rater(nn.Module):
    def __init__(self, vocab=32_000, d=1024, depth=16):
        super().__init__()
        self.e = nn.Embedding(vocab, d, padding_idx=0)
        layer = nn.TransformerEncoderLayer(d, 16, 4 * d, batch_first=True, norm_first=True)
        self.t = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.o = nn.Linear(d, 5)

    def forward(self, ids):
        pad = ids.eq(0)
        h = self.t(self.e(ids), src_key_padding_mask=pad)
        h = h.float().masked_fill(pad.unsqueeze(-1), 0.0).sum(1) / (~pad).sum(1, keepdim=True)
        return self.o(h.to(self.o.weight.dtype))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--local_rank", type=int, default=-1)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--resume", default=None)
    args = ap.parse_args()
    net = Rater()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=net.parameters(), training_data=dataset("train"), config=CONFIG
    )
    if args.resume:
        engine.load_checkpoint(args.resume)
    for epoch in range(args.epochs):
        engine.train()
        for ids, stars in loader:
            ids, stars = ids.to(engine.device), stars.to(engine.device)
            loss = F.cross_entropy(engine(ids).float(), stars)
            engine.backward(loss)
            engine.step()
            if engine.global_steps % 50 == 0 and engine.global_rank == 0:
                print(engine.global_steps, loss.item(), engine.get_lr())
        engine.save_checkpoint("rater", tag=f"epoch{epoch}")


if __name__ == "__main__":
    main()
