# source: ContextualAI/HALOs issue #15 (see pytorch/pytorch issue #72548)
# mistake: an FSDP-sharded policy's gradients are clipped with torch.nn.utils.clip_grad_norm_, which sees only this rank's shard, so each rank clips by a different, too small norm
# severity: error
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from prefs import pair_loader


def shard(model, trainable):
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    model = FSDP(
        model,
        auto_wrap_policy=wrap,
        mixed_precision=half,
        sharding_strategy=ShardingStrategy.FULL_SHARD,  # <- here
        device_id=torch.cuda.current_device(),
        use_orig_params=True,
    )
    return model.train() if trainable else model.eval().requires_grad_(False)


def sequence_logp(model, ids, mask, labels):
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    target = labels[:, 1:]
    keep = target.ne(-100)
    picked = torch.gather(logits.log_softmax(-1), 2, target.masked_fill(~keep, 0).unsqueeze(2)).squeeze(2)
    return (picked * keep).sum(-1)


def dpo(policy, reference, batch, beta):
    pol = sequence_logp(policy, batch["ids"], batch["mask"], batch["labels"])
    with torch.no_grad():
        ref = sequence_logp(reference, batch["ids"], batch["mask"], batch["labels"])
    win, lose = (pol - ref).chunk(2)
    return -F.logsigmoid(beta * (win - lose)).mean(), (win > lose).float().mean()


def clip_gradient(policy, limit):
    return torch.nn.utils.clip_grad_norm_(policy.parameters(), limit)  # <- here


def main(name="meta-llama/Llama-3.2-3B-Instruct", beta=0.1, accumulate=8, limit=10.0, steps=2000):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    policy = shard(AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float32), True)
    reference = shard(AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float32), False)
    opt = torch.optim.AdamW(policy.parameters(), lr=5e-7)
    warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 150))
    stream = iter(pair_loader(rank, dist.get_world_size()))

    for step in range(steps):
        acc = 0.0
        for _ in range(accumulate):
            batch = {k: v.cuda(non_blocking=True) for k, v in next(stream).items()}
            loss, right = dpo(policy, reference, batch, beta)
            (loss / accumulate).backward()
            acc += right.item() / accumulate
        norm = clip_gradient(policy, limit)  # <- here
        opt.step()
        warm.step()
        opt.zero_grad(set_to_none=True)
        if rank == 0 and step % 10 == 0:
            print(f"{step} loss {loss.item():.4f} acc {acc:.2f} norm {float(norm):.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
