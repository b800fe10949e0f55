# why correct: FSDP in float16 uses ShardedGradScaler and the wrapped model's own clip_grad_norm_, after unscale_
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


class ShardedTrainer:
    def __init__(self, model, layer_cls, lr=3e-4, max_norm=1.0):
        half = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={layer_cls})
        self.model = FSDP(
            model, auto_wrap_policy=policy, mixed_precision=half, device_id=torch.cuda.current_device(), use_orig_params=True
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95))
        self.scaler = ShardedGradScaler()
        self.max_norm = max_norm

    def loss(self, tokens):
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def update(self):
        self.scaler.unscale_(self.optimizer)
        norm = self.model.clip_grad_norm_(self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def train_step(self, tokens):
        loss = self.loss(tokens.cuda(non_blocking=True))
        self.backward(loss)
        return loss.detach(), self.update()


class Layer(nn.TransformerEncoderLayer):
    pass


class Decoder(nn.Module):
    def __init__(self, vocab=32000, dim=2048, n=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, 16, 4 * dim, batch_first=True, norm_first=True) for _ in range(n))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        n = ids.size(1)
        mask = torch.ones(n, n, dtype=torch.bool, device=ids.device).triu(1)
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(self.norm(x))


def main(loader, steps):
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    trainer = ShardedTrainer(Decoder(), Layer)
    for i, tokens in enumerate(loader):
        loss, norm = trainer.train_step(tokens)
        if dist.get_rank() == 0 and i % 20 == 0:
            print(f"{i} loss {loss.item():.3f} norm {norm.item():.3f}")
        if i + 1 == steps:
            break
    dist.destroy_process_group()
