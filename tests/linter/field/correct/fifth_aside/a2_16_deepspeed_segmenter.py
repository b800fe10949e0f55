# why correct: DeepSpeed owns scaling, clipping and accumulation; the engine does backward and step, and its checkpoint carries the loss scale
import os

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn


def make_config(fp16=True, accum=8):
    cfg = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accum,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 6e-5, "eps": 1e-8, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1500, "total_num_steps": 80_000}},
        "zero_optimization": {"stage": 2, "overlap_comm": True},
    }
    if fp16:
        cfg["fp16"] = {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "min_loss_scale": 1}
    else:
        cfg["bf16"] = {"enabled": True}
    return cfg


class Segmenter(nn.Module):
    def __init__(self, encoder, channels, classes):
        super().__init__()
        self.encoder = encoder
        self.lateral = nn.ModuleList(nn.Conv2d(c, 256, 1) for c in channels)
        self.head = nn.Sequential(nn.Conv2d(256 * len(channels), 256, 1), nn.GELU(), nn.Conv2d(256, classes, 1))

    def forward(self, x):
        feats = [l(f) for l, f in zip(self.lateral, self.encoder(x))]
        size = feats[0].shape[-2:]
        feats = [F.interpolate(f, size, mode="bilinear", align_corners=False) for f in feats]
        return self.head(torch.cat(feats, 1))


def criterion(logits, target):
    logits = F.interpolate(logits.float(), target.shape[-2:], mode="bilinear", align_corners=False)
    return F.cross_entropy(logits, target, ignore_index=255)


def main(encoder, channels, train_set, out, epochs=40, resume=False, fp16=True):
    net = Segmenter(encoder, channels, classes=19)
    engine, _, loader, _ = deepspeed.initialize(
        model=net, model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=train_set, config=make_config(fp16))
    dtype = torch.float16 if fp16 else torch.bfloat16
    start = 0
    if resume:
        _, client = engine.load_checkpoint(out)
        start = client["epoch"] + 1
    for epoch in range(start, epochs):
        engine.train()
        total = torch.zeros((), device=engine.device)
        for img, target in loader:
            logits = engine(img.to(engine.device, dtype))
            loss = criterion(logits, target.to(engine.device))
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        if int(os.environ.get("RANK", 0)) == 0:
            print(epoch, (total / len(loader)).item())
        engine.save_checkpoint(out, tag=f"epoch{epoch}", client_state={"epoch": epoch})
