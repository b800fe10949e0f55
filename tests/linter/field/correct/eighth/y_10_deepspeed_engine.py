# why correct: the DeepSpeed engine does scaling, division by the accumulation steps, clipping, stepping and zeroing; the loop calls only backward and step on it.
import argparse
import os

import deepspeed
import torch
import torch.nn.functional as F
from torch.utils.tensorboard import SummaryWriter

from table.data import TableTextDataset, collate
from table.model import TableBart


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="totto")
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--out", default="runs/totto")
    p.add_argument("--tag", default=None)
    p.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(p).parse_args()


def config():
    return {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "steps_per_print": 1000000,
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 14, "min_loss_scale": 1},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "weight_decay": 0.0}},
        "scheduler": {"type": "WarmupDecayLR",
                      "params": {"warmup_num_steps": 500, "total_num_steps": 20000, "warmup_max_lr": 1e-4}},
    }


def label_smoothed(logits, labels, eps=0.1):
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=eps)


def main():
    args = arguments()
    deepspeed.init_distributed()
    model = TableBart.from_pretrained("facebook/bart-base")
    data = TableTextDataset(args.data, "train")
    engine, optimizer, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=data, collate_fn=collate, config=config())
    board = SummaryWriter(args.out) if engine.global_rank == 0 else None

    start = 0
    if args.tag:
        _, extra = engine.load_checkpoint(args.out, tag=args.tag)
        start = extra["epoch"] + 1

    for epoch in range(start, args.epochs):
        engine.train()
        running, seen = 0.0, 0
        for batch in loader:
            batch = {k: v.to(engine.device) for k, v in batch.items()}
            logits = engine(batch["input_ids"], batch["attention_mask"], batch["decoder_input_ids"])
            loss = label_smoothed(logits, batch["labels"])
            engine.backward(loss)
            boundary = engine.is_gradient_accumulation_boundary()
            engine.step()
            running, seen = running + loss.item(), seen + 1
            if boundary and board is not None and engine.global_steps % 20 == 0:
                board.add_scalar("loss", running / seen, engine.global_steps)
                board.add_scalar("scale", optimizer.cur_scale if hasattr(optimizer, "cur_scale") else 1.0,
                                 engine.global_steps)
                running, seen = 0.0, 0
        engine.save_checkpoint(args.out, tag=f"epoch{epoch}", client_state={"epoch": epoch})

    if engine.global_rank == 0:
        torch.save(engine.module.state_dict(), os.path.join(args.out, "weights_fp16.bin"))


if __name__ == "__main__":
    main()
