# source: PrimeIntellect-ai/OpenDiloco PR #6
# mistake: a sharded FullyShardedDataParallel model is clipped with torch.nn.utils.clip_grad_norm_, which sees only the rank's shard: every rank clips by another norm
# severity: error
import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def shard(model, half):
    return FSDP(
        model,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}),
        mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=torch.float32, buffer_dtype=torch.float32),
        device_id=torch.cuda.current_device(),
        use_orig_params=True,
    )


class Inner:
    """One worker's inner optimisation with accumulation."""

    def __init__(self, model, half, accum, lr):
        self.model = model
        self.accum = accum
        self.opt = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.scaler = ShardedGradScaler(enabled=half is torch.float16)

    def micro(self, batch):
        out = self.model(input_ids=batch, labels=batch)
        loss = out.loss / self.accum
        self.scaler.scale(loss).backward()
        return loss.detach()

    def step(self, stream):
        loss = sum(self.micro(next(stream).cuda(non_blocking=True)) for _ in range(self.accum))
        self.scaler.unscale_(self.opt)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # <- here
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad(set_to_none=True)
        return loss, norm


def train(stream, steps=88_000, half=torch.float16):
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = shard(LlamaForCausalLM(LlamaConfig(hidden_size=1024, num_hidden_layers=12, num_attention_heads=16)), half)  # <- here
    inner = Inner(model, half, accum=8, lr=4e-4)
    warm = torch.optim.lr_scheduler.LambdaLR(inner.opt, lambda s: min(1.0, (s + 1) / 1000))
    for step in range(steps):
        loss, norm = inner.step(stream)
        warm.step()
        if step % 10 == 0:
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                print(f"{step} loss {loss.item():.4f} norm {float(norm):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    from c4 import token_stream

    train(token_stream(AutoTokenizer.from_pretrained("hf-internal-testing/llama-tokenizer"), 1024))
