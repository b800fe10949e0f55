# why correct: the DeepSpeed engine scales, unscales, clips, accumulates and zeroes the gradients itself, so plain engine.backward/step is all there is
import argparse

import deepspeed
import torch
import torch.nn.functional as F


def ds_config(args):
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.accum,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 14, "loss_scale_window": 500},
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 200, "warmup_max_lr": args.lr}},
    }


def lm_loss(engine, ids, labels):
    logits = engine(ids)
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def train_epoch(engine, loader, log_every):
    engine.train()
    for i, (ids, labels) in enumerate(loader):
        loss = lm_loss(engine, ids.to(engine.device), labels.to(engine.device))
        engine.backward(loss)
        engine.step()
        if i % log_every == 0 and engine.global_rank == 0:
            print(f"{engine.global_steps} loss {loss.item():.4f} scale {engine.optimizer.loss_scale}")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--local_rank", type=int, default=-1)
    p.add_argument("--micro-batch", type=int, default=4)
    p.add_argument("--accum", type=int, default=8)
    p.add_argument("--lr", type=float, default=2e-5)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--resume", default=None)
    args = p.parse_args()

    from sft.data import packed_dataset
    from sft.model import build_lm

    model = build_lm()
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=[w for w in model.parameters() if w.requires_grad],
        training_data=packed_dataset(),
        config=ds_config(args),
    )
    if args.resume:
        engine.load_checkpoint(args.resume)
    for epoch in range(args.epochs):
        train_epoch(engine, loader, 20)
        engine.save_checkpoint("ckpt", tag=f"epoch{epoch}")


if __name__ == "__main__":
    main()
