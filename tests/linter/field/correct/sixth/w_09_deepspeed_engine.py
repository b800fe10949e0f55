# why correct: the DeepSpeed engine owns loss scaling, division by the accumulation steps, clipping, zero_grad and skipped steps, so the loop has only forward, engine.backward and engine.step
import argparse
import json

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


def make_config(args):
    cfg = {
        "train_micro_batch_size_per_gpu": args.micro,
        "gradient_accumulation_steps": args.accum,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": args.stage},
        "optimizer": {"type": "Adam", "params": {"lr": args.lr, "betas": [0.9, 0.95], "eps": 1e-8}},
    }
    if args.half == "fp16":
        cfg["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "min_loss_scale": 1}
    elif args.half == "bf16":
        cfg["bf16"] = {"enabled": True}
    return cfg


def dtype_of(engine):
    if engine.fp16_enabled():
        return torch.float16
    if engine.bfloat16_enabled():
        return torch.bfloat16
    return torch.float32


class WeatherNet(nn.Module):
    def __init__(self, fields, width=512, depth=12):
        super().__init__()
        self.patch = nn.Conv2d(fields, width, 4, 4)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.trunk = nn.TransformerEncoder(layer, depth)
        self.un = nn.ConvTranspose2d(width, fields, 4, 4)

    def forward(self, x):
        h = self.patch(x)
        b, c, hh, ww = h.shape
        h = self.trunk(h.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(b, c, hh, ww)
        return self.un(h)


def weighted_rmse(increment, start, truth, lat_weight):
    err = (start.float() + increment.float() - truth.float()).square() * lat_weight[None, None, :, None]
    return err.mean((1, 2, 3)).sqrt().mean()


def main(dataset, fields, lat_weight):
    p = argparse.ArgumentParser()
    p.add_argument("--half", choices=["fp16", "bf16", "none"], default="fp16")
    p.add_argument("--micro", type=int, default=2)
    p.add_argument("--accum", type=int, default=8)
    p.add_argument("--stage", type=int, default=1)
    p.add_argument("--lr", type=float, default=2e-4)
    p.add_argument("--epochs", type=int, default=30)
    p.add_argument("--local_rank", type=int, default=0)
    p.add_argument("--ckpt", default="ckpt/weather")
    p.add_argument("--resume", action="store_true")
    args = p.parse_args()

    deepspeed.init_distributed()
    net = WeatherNet(fields)
    engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=make_config(args))
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, args.micro, sampler=sampler, num_workers=4, drop_last=True)
    lat_weight = lat_weight.to(engine.device)
    kind = dtype_of(engine)

    first = 0
    if args.resume:
        _, extra = engine.load_checkpoint(args.ckpt)
        first = extra["epoch"] + 1 if extra else 0

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        engine.train()
        for now, later in loader:
            now = now.to(engine.device)
            later = later.to(engine.device)
            loss = weighted_rmse(engine(now.to(kind)), now, later, lat_weight)
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0:
            print(json.dumps({"epoch": epoch, "loss": loss.item(), "skipped": engine.skipped_steps}))
        engine.save_checkpoint(args.ckpt, client_state={"epoch": epoch})
