# why correct: the DeepSpeed engine owns scaling, clipping, accumulation and zeroing, so there is no scaler, no division and no zero_grad in the loop
import argparse

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F

DS = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1000, "warmup_max_lr": 2e-4}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000,
             "hysteresis": 2, "min_loss_scale": 1},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
}


class ProteinLM(nn.Module):
    def __init__(self, vocab=33, dim=768, depth=12, max_len=1024):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(max_len, dim)
        layer = nn.TransformerEncoderLayer(dim, 12, 4 * dim, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        pos = torch.arange(ids.size(1), device=ids.device)
        return self.out(self.enc(self.emb(ids) + self.pos(pos)))


def corrupt(ids, p=0.15, mask_id=32, pad=1):
    pick = (torch.rand(ids.shape, device=ids.device) < p) & (ids != pad)
    return ids.masked_fill(pick, mask_id), ids.masked_fill(~pick, -100)


def main(dataset):
    p = argparse.ArgumentParser()
    p.add_argument("--local_rank", type=int, default=-1)
    p.add_argument("--steps", type=int, default=100000)
    p.add_argument("--save", default="ckpt")
    args = p.parse_args()
    model = ProteinLM()
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=dataset, config=DS)
    _, client = engine.load_checkpoint(args.save)
    step = client["step"] if client else 0
    while step < args.steps:
        for ids in loader:
            ids = ids.to(engine.device)
            x, y = corrupt(ids)
            logits = engine(x)
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), ignore_index=-100)
            engine.backward(loss)
            engine.step()
            step += 1
            if step % 100 == 0 and engine.global_rank == 0:
                print(step, loss.item(), engine.get_lr())
            if step % 5000 == 0:
                engine.save_checkpoint(args.save, client_state={"step": step})
            if step >= args.steps:
                break
