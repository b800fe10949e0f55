# why correct: FSDP with float16 compute uses ShardedGradScaler, unscales before clipping, and clips with the FSDP module's own method over all shards
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM
from transformers.models.opt.modeling_opt import OPTDecoderLayer

from corpus import token_stream


def wrap(net):
    return FSDP(
        net,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={OPTDecoderLayer}),
        mixed_precision=MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float32),
        device_id=torch.cuda.current_device(),
    )


def micro(model, tokens):
    logits = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def main(name="facebook/opt-1.3b", accumulate=4, steps=5000):
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = wrap(AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95))
    scaler = ShardedGradScaler(init_scale=2.0**12)
    batches = iter(token_stream(dist.get_rank(), dist.get_world_size()))

    model.train()
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for k in range(accumulate):
            tokens = next(batches).cuda(non_blocking=True)
            if k < accumulate - 1:
                with model.no_sync():
                    loss = micro(model, tokens) / accumulate
                    scaler.scale(loss).backward()
            else:
                loss = micro(model, tokens) / accumulate
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(step, loss.item() * accumulate, norm.item(), scaler.get_scale())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
