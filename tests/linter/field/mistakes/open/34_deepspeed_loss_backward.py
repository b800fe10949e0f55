# source: https://github.com/deepspeedai/DeepSpeed/issues/329
# mistake: loss.backward() is called instead of engine.backward(loss), so the fp16 engine neither scales the loss nor reduces the gradients before engine.step() divides by the scale.
# severity: error
# torch: any (DeepSpeed before its PyTorch-style backward, #7665)
import argparse

import deepspeed
import torch
import torch.nn as nn

from corpus import LineDataset


def ds_config(micro_batch, lr):
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": lr}},
        "fp16": {"enabled": True, "initial_scale_power": 16},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
    }


class CharLM(nn.Module):
    def __init__(self, vocab=256, dim=512):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.LSTM(dim, dim, num_layers=2, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.out(h)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    net = CharLM()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=net.parameters(), training_data=LineDataset(), config=ds_config(16, 1e-3)
    )
    for epoch in range(args.epochs):
        for x, y in loader:
            logits = engine(x.to(engine.device))
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), y.to(engine.device).flatten())
            loss.backward()  # <- here
            engine.step()
        if torch.distributed.get_rank() == 0:
            print(epoch, loss.item())


if __name__ == "__main__":
    main()
