# why correct: the DeepSpeed engine scales, accumulates, clips, steps and zeroes by its config; the loop rightly has no scaler, no division, no clipping, no zero_grad and no modulo
import argparse
import json

import deepspeed
import torch
from transformers import BartForConditionalGeneration

from summaries import make_dataset, pad_pairs


def config(path, fp16):
    with open(path) as fh:
        conf = json.load(fh)
    conf.update(
        train_micro_batch_size_per_gpu=4,
        gradient_accumulation_steps=8,
        gradient_clipping=1.0,
        fp16={"enabled": fp16, "loss_scale": 0, "initial_scale_power": 12},
        bf16={"enabled": not fp16},
        zero_optimization={"stage": 2},
    )
    conf.pop("train_batch_size", None)
    return conf


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--conf", default="ds_base.json")
    p.add_argument("--fp16", action="store_true")
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--resume")
    p.add_argument("--local_rank", type=int, default=-1)
    a = p.parse_args()
    deepspeed.init_distributed()

    net = BartForConditionalGeneration.from_pretrained("facebook/bart-base")
    engine, _, loader, _ = deepspeed.initialize(
        model=net,
        model_parameters=[q for q in net.parameters() if q.requires_grad],
        training_data=make_dataset("train"),
        collate_fn=pad_pairs,
        config=config(a.conf, a.fp16),
    )
    start = 0
    if a.resume:
        _, client = engine.load_checkpoint(a.resume)
        start = client["epoch"] + 1

    for epoch in range(start, a.epochs):
        engine.train()
        meter = torch.zeros(2, device=engine.device)
        for batch in loader:
            batch = {k: v.to(engine.device) for k, v in batch.items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            meter += torch.stack([loss.detach().float(), loss.new_ones((), dtype=torch.float32)])
            if engine.is_gradient_accumulation_boundary() and engine.global_steps % 50 == 0 and engine.global_rank == 0:
                print(epoch, engine.global_steps, (meter[0] / meter[1]).item(), engine.get_lr())
        engine.save_checkpoint("bart_sum", client_state={"epoch": epoch})


if __name__ == "__main__":
    main()
