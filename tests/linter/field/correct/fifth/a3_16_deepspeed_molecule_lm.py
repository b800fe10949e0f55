# why correct: the DeepSpeed engine scales the loss, divides it by the accumulation steps, clips, steps and zeroes itself, so engine.backward and engine.step after each micro-batch are all that is needed
import argparse

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F


def engine_config(micro, accumulate, lr, steps, bf16):
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 500, "total_num_steps": steps}},
    }
    if bf16:
        config["bf16"] = {"enabled": True}
    else:
        config["fp16"] = {"enabled": True, "initial_scale_power": 14, "loss_scale_window": 1000}
    return config


class SmilesLM(nn.Module):
    def __init__(self, vocab, dim=768, depth=12, heads=12, length=256):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.trunk = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, tokens):
        n = tokens.shape[1]
        x = self.tok(tokens) + self.pos(torch.arange(n, device=tokens.device))
        causal = torch.ones(n, n, dtype=torch.bool, device=tokens.device).triu(1)
        return self.head(self.norm(self.trunk(x, mask=causal)))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--corpus", required=True)
    p.add_argument("--vocab", type=int, default=600)
    p.add_argument("--steps", type=int, default=50_000)
    p.add_argument("--micro", type=int, default=32)
    p.add_argument("--accumulate", type=int, default=4)
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--resume", action="store_true")
    p.add_argument("--out", default="smiles-lm")
    p.add_argument("--local_rank", type=int, default=-1)
    args = p.parse_args()

    net = SmilesLM(args.vocab)
    engine, _, loader, _ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), training_data=torch.load(args.corpus),
        config=engine_config(args.micro, args.accumulate, args.lr, args.steps, args.bf16),
    )
    if args.resume:
        engine.load_checkpoint(args.out)

    while engine.global_steps < args.steps:
        for tokens in loader:
            tokens = tokens.to(engine.device)
            logits = engine(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)
            done = engine.global_steps
            engine.backward(loss)
            engine.step()
            if engine.global_steps > done and engine.global_steps % 1000 == 0:
                engine.save_checkpoint(args.out)
            if engine.global_steps >= args.steps:
                break


if __name__ == "__main__":
    main()
