# why correct: division by the accumulation steps, clipping, stepping and zeroing are all left to the DeepSpeed engine
import argparse
import json

import deepspeed
import torch
from torch import distributed as dist
from torch.utils.data import IterableDataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def engine_config(args):
    return {
        "train_micro_batch_size_per_gpu": args.micro,
        "gradient_accumulation_steps": args.accum,
        "gradient_clipping": args.clip,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "reduce_scatter": True, "overlap_comm": True},
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 500, "warmup_max_lr": args.lr, "total_num_steps": args.updates},
        },
    }


class Rulings(IterableDataset):
    def __init__(self, path, tok, length, rank, world):
        self.path, self.tok, self.length = path, tok, length
        self.rank, self.world = rank, world

    def __iter__(self):
        buffer = []
        while True:
            with open(self.path) as fh:
                for n, line in enumerate(fh):
                    if n % self.world != self.rank:
                        continue
                    buffer += self.tok(json.loads(line)["text"])["input_ids"] + [self.tok.eos_token_id]
                    while len(buffer) >= self.length:
                        yield torch.tensor(buffer[: self.length])
                        buffer = buffer[self.length :]


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("rulings")
    ap.add_argument("--base", default="EleutherAI/pythia-1.4b")
    ap.add_argument("--micro", type=int, default=4)
    ap.add_argument("--accum", type=int, default=16)
    ap.add_argument("--updates", type=int, default=8000)
    ap.add_argument("--lr", type=float, default=2e-4)
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--local_rank", type=int, default=0)
    return ap.parse_args()


def main():
    args = parse()
    deepspeed.init_distributed()
    tok = AutoTokenizer.from_pretrained(args.base)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.base))
    model.gradient_checkpointing_enable()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=engine_config(args))
    data = Rulings(args.rulings, tok, 1024, dist.get_rank(), dist.get_world_size())
    loader = torch.utils.data.DataLoader(data, args.micro)

    window = 0.0
    for ids in loader:
        ids = ids.to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        window += loss.item() / args.accum
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if boundary:
            if dist.get_rank() == 0 and engine.global_steps % 10 == 0:
                print(engine.global_steps, f"{window:.4f}", engine.get_lr()[0])
            window = 0.0
            if engine.global_steps % 1000 == 0:
                engine.save_checkpoint("rulings_ckpt")
        if engine.global_steps >= args.updates:
            break
    engine.save_checkpoint("rulings_ckpt", tag="final")


if __name__ == "__main__":
    main()
