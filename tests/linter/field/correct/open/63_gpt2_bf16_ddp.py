# style of: karpathy/build-nanogpt:train_gpt2.py
# torch: 2.0+
import math
import os

import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

from gpt import GPT, GPTConfig, ShardLoader

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="nccl")
    ddp_rank = int(os.environ["RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(device)
else:
    ddp_rank, ddp_world_size, device = 0, 1, "cuda" if torch.cuda.is_available() else "cpu"
master_process = ddp_rank == 0
device_type = "cuda" if device.startswith("cuda") else "cpu"

total_batch_size, B, T = 524288, 64, 1024
assert total_batch_size % (B * T * ddp_world_size) == 0
grad_accum_steps = total_batch_size // (B * T * ddp_world_size)
train_loader = ShardLoader(B, T, ddp_rank, ddp_world_size, "train")
torch.set_float32_matmul_precision("high")

model = GPT(GPTConfig(vocab_size=50304)).to(device)
model = torch.compile(model)
if ddp:
    model = DDP(model, device_ids=[int(os.environ["LOCAL_RANK"])])
raw_model = model.module if ddp else model

max_lr, min_lr, warmup_steps, max_steps = 6e-4, 6e-5, 715, 19073


def get_lr(it):
    if it < warmup_steps:
        return max_lr * (it + 1) / warmup_steps
    ratio = min(1.0, (it - warmup_steps) / (max_steps - warmup_steps))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (max_lr - min_lr)


optimizer = torch.optim.AdamW(raw_model.parameters(), lr=max_lr, betas=(0.9, 0.95), eps=1e-8)

for step in range(max_steps):
    model.train()
    optimizer.zero_grad()
    loss_accum = torch.zeros((), device=device)
    for micro_step in range(grad_accum_steps):
        x, y = train_loader.next_batch()
        x, y = x.to(device), y.to(device)
        if ddp:
            # read by the forward pass: gradients are averaged on the last micro step only
            model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
        with torch.autocast(device_type=device_type, dtype=torch.bfloat16):
            logits, loss = model(x, y)
        loss = loss / grad_accum_steps
        loss_accum += loss.detach()
        loss.backward()
    if ddp:
        dist.all_reduce(loss_accum, op=dist.ReduceOp.AVG)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    optimizer.step()
    if master_process:
        print(f"{step:5d} | loss {loss_accum.item():.6f} | norm {norm:.4f}")
        if step > 0 and step % 5000 == 0:
            state = raw_model._orig_mod.state_dict()
            torch.save({"model": state, "optimizer": optimizer.state_dict(), "step": step}, f"model_{step:05d}.pt")

if ddp:
    destroy_process_group()
