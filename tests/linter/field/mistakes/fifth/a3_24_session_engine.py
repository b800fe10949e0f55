# source: https://github.com/huggingface/transformers/pull/9705
# mistake: backward is called on the loss tensor and not through the DeepSpeed engine, so the fp16 loss scale (and the accumulation scaling) that engine.step() undoes was never applied
# severity: error
import argparse

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 500},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
}


class Sessions(Dataset):
    def __init__(self, path):
        blob = torch.load(path)
        self.items, self.target = blob["items"], blob["target"]

    def __len__(self):
        return len(self.target)

    def __getitem__(self, i):
        return self.items[i], self.target[i]


class SessionModel(nn.Module):
    def __init__(self, n_items, dim=1024, depth=12):
        super().__init__()
        self.items = nn.Embedding(n_items, dim, padding_idx=0)
        layer = nn.TransformerEncoderLayer(dim, 16, 4 * dim, batch_first=True, norm_first=True)
        self.trunk = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, items):
        h = self.trunk(self.items(items), src_key_padding_mask=items == 0)
        return self.norm(h[:, -1]) @ self.items.weight.t()


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--sessions", required=True)
    p.add_argument("--n-items", type=int, required=True)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--out", default="session-model")
    return deepspeed.add_config_arguments(p).parse_args()


def main():
    args = parse()
    net = SessionModel(args.n_items)
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=net.parameters(), training_data=Sessions(args.sessions), config=DS_CONFIG
    )
    for epoch in range(args.epochs):
        for n, (items, target) in enumerate(loader):
            items, target = items.to(engine.device), target.to(engine.device)
            logits = engine(items)
            loss = F.cross_entropy(logits.float(), target)
            loss.backward()  # <- here
            engine.step()
            if engine.global_rank == 0 and n % 200 == 0:
                print(f"epoch {epoch} batch {n} loss {loss.item():.3f}")
        engine.save_checkpoint(args.out, tag=f"epoch{epoch}")


if __name__ == "__main__":
    main()
