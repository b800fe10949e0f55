"""
# source: https://github.com/deepspeedai/DeepSpeed/issues/7439
# mistake: the loss is divided by gradient_accumulation_steps although engine.backward() divides it too, so gradients are too small by that factor and more of them underflow in fp16.
# severity: error
# torch: any (DeepSpeed)
"""
import argparse
import json

import deepspeed
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 16,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}},
}


class InstructionRows(torch.utils.data.Dataset):
    def __init__(self, path, tokenizer, max_len=1024):
        with open(path) as f:
            self.rows = [json.loads(line) for line in f]
        self.tokenizer, self.max_len = tokenizer, max_len

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        text = self.rows[i]["prompt"] + self.rows[i]["answer"] + self.tokenizer.eos_token
        enc = self.tokenizer(text, truncation=True, max_length=self.max_len, padding="max_length", return_tensors="pt")
        return enc.input_ids[0], enc.attention_mask[0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="facebook/opt-1.3b")
    parser.add_argument("--data", default="sft.jsonl")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()

    deepspeed.init_distributed()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    data = InstructionRows(args.data, tokenizer)
    loader = DataLoader(data, DS_CONFIG["train_micro_batch_size_per_gpu"], sampler=DistributedSampler(data))
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=DS_CONFIG)
    accum = DS_CONFIG["gradient_accumulation_steps"]

    for epoch in range(args.epochs):
        engine.train()
        loader.sampler.set_epoch(epoch)
        for step, (ids, mask) in enumerate(loader):
            ids, mask = ids.to(engine.device), mask.to(engine.device)
            logits = engine(input_ids=ids, attention_mask=mask).logits
            labels = ids.masked_fill(mask == 0, -100)
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
            loss = loss / accum  # <- here
            engine.backward(loss)
            engine.step()
            if step % 100 == 0 and torch.distributed.get_rank() == 0:
                print(epoch, step, loss.item() * accum)
        engine.save_checkpoint("ckpt", tag=f"epoch{epoch}")


if __name__ == "__main__":
    main()
