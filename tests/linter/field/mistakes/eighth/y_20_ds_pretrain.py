# source: https://github.com/huggingface/transformers/pull/9705
# mistake: under DeepSpeed fp16 the loop calls loss.backward() instead of engine.backward(loss), so loss scaling and gradient reduction are bypassed.
# severity: error
import argparse
import json
import time

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler

from protein.tokens import SequenceShards, mask_tokens
from protein.esm import ProteinLM

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 4e-4, "betas": [0.9, 0.98], "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 4e-4, "warmup_num_steps": 2000}},
}


def cli():
    p = argparse.ArgumentParser()
    p.add_argument("--shards", required=True)
    p.add_argument("--layers", type=int, default=30)
    p.add_argument("--steps", type=int, default=100000)
    p.add_argument("--save", default="ckpt")
    p.add_argument("--load", default=None)
    p.add_argument("--local_rank", type=int, default=0)
    return p.parse_args()


def main():
    args = cli()
    deepspeed.init_distributed()
    torch.cuda.set_device(args.local_rank)
    data = SequenceShards(args.shards)
    loader = DataLoader(data, batch_size=DS_CONFIG["train_micro_batch_size_per_gpu"],
                        sampler=DistributedSampler(data), num_workers=4, drop_last=True)

    net = ProteinLM(layers=args.layers)
    engine, _, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters(),  # <- here
                                           config=DS_CONFIG)
    begin = 0
    if args.load:
        _, client = engine.load_checkpoint(args.load)
        begin = client["step"]

    engine.train()
    tic, window = time.time(), []
    step, epoch = begin, 0
    while step < args.steps:
        loader.sampler.set_epoch(epoch)
        for seq in loader:
            seq = seq.to(engine.device)
            noisy, labels = mask_tokens(seq, rate=0.15)
            loss = engine(noisy, labels=labels)
            loss.backward()  # <- here
            engine.step()  # <- here
            window.append(loss.item())
            step += 1
            if step % 200 == 0 and engine.global_rank == 0:
                rec = {"step": step, "loss": sum(window) / len(window), "sec": time.time() - tic}
                print(json.dumps(rec), flush=True)
                tic, window = time.time(), []
            if step % 10000 == 0:
                engine.save_checkpoint(args.save, tag=f"s{step}", client_state={"step": step})
            if step >= args.steps:
                break
        epoch += 1


if __name__ == "__main__":
    main()
