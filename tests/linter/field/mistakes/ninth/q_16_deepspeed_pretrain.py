# source: https://github.com/deepspeedai/DeepSpeed/issues/776
# mistake: the client divides the loss by gradient_accumulation_steps although engine.backward already does, so gradients are a factor of 8 too small
# severity: error
import argparse

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F

ACCUM = 8

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": ACCUM,  # <- here
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 1000},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1000, "warmup_max_lr": 0.05}},
}


class ProteinLM(nn.Module):
    def __init__(self, vocab=33, dim=768, depth=12, heads=12, length=1024):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, dim * 4, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        return self.out(self.norm(self.body(x)))


def corrupt(ids, mask_id=32, rate=0.15):
    pick = torch.rand(ids.shape, device=ids.device) < rate
    labels = ids.masked_fill(~pick, -100)
    return ids.masked_fill(pick, mask_id), labels


def main(dataset):
    ap = argparse.ArgumentParser()
    ap.add_argument("--local_rank", type=int, default=-1)
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--out", default="ckpt")
    args = ap.parse_args()

    model = ProteinLM()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=dataset, config=DS_CONFIG)

    for epoch in range(args.epochs):
        engine.train()
        for ids in loader:
            ids = ids.to(engine.device)
            noisy, labels = corrupt(ids)
            logits = engine(noisy)
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)
            loss = loss / ACCUM  # <- here
            engine.backward(loss)  # <- here
            engine.step()
            if engine.global_rank == 0 and engine.global_steps % 100 == 0 and engine.is_gradient_accumulation_boundary():
                print(epoch, engine.global_steps, loss.item() * ACCUM)
        engine.save_checkpoint(args.out, tag=f"epoch{epoch}")
