# source: https://github.com/verl-project/verl/pull/6150
# mistake: under FSDP with float16 an ordinary GradScaler checks only the local shard for inf, so ranks disagree about skipping steps and about the scale
# severity: error
import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler  # <- here
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

ALPHABET = 33
MASK_TOKEN = 32


class ProteinLM(nn.Module):
    def __init__(self, dim=1280, depth=33, heads=20):
        super().__init__()
        self.embed = nn.Embedding(ALPHABET, dim)
        self.pos = nn.Embedding(1024, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 4 * dim, batch_first=True, norm_first=True) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, ALPHABET)

    def forward(self, tokens):
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.pos(place)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def corrupt(tokens, rate=0.15):
    chosen = torch.rand(tokens.shape, device=tokens.device) < rate
    labels = tokens.masked_fill(~chosen, -100)
    return tokens.masked_fill(chosen, MASK_TOKEN), labels


def setup():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    return local


def train(loader, steps, lr=4e-4, clip=1.0):
    local = setup()
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer})
    half = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float16)
    model = FSDP(ProteinLM(), auto_wrap_policy=policy, mixed_precision=half, device_id=local)
    optim = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    scaler = GradScaler("cuda")  # <- here

    for step, tokens in zip(range(steps), loader):
        noisy, labels = corrupt(tokens.to(local, non_blocking=True))
        optim.zero_grad(set_to_none=True)
        logits = model(noisy)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)
        scaler.scale(loss).backward()
        scaler.unscale_(optim)
        model.clip_grad_norm_(clip)
        scaler.step(optim)
        scaler.update()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(step, loss.item(), scaler.get_scale())

    dist.destroy_process_group()
