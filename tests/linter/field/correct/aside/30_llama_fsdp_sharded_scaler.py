# style of: meta-llama/llama-recipes:src/llama_recipes/utils/train_utils.py
# torch: 2.0+
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def train(model, train_loader, optimizer, lr_scheduler, train_config, fsdp_config=None, local_rank=0):
    if train_config.use_fp16 and train_config.enable_fsdp:
        scaler = ShardedGradScaler()
    elif train_config.use_fp16:
        scaler = torch.cuda.amp.GradScaler()
    autocast = torch.cuda.amp.autocast if train_config.use_fp16 else nullcontext

    accumulation = train_config.gradient_accumulation_steps
    total_length = len(train_loader)
    tail_start = total_length - total_length % accumulation
    history = []

    for epoch in range(train_config.num_epochs):
        model.train()
        total_loss = 0.0
        for step, batch in enumerate(train_loader):
            batch = {k: v.to(local_rank) for k, v in batch.items()}
            with autocast():
                loss = model(**batch).loss
            total_loss += loss.detach().float()
            window = accumulation if step < tail_start else total_length - tail_start
            loss = loss / window
            should_step = (step + 1) % accumulation == 0 or step == total_length - 1

            if train_config.use_fp16:
                scaler.scale(loss).backward()
                if should_step:
                    if train_config.gradient_clipping:
                        scaler.unscale_(optimizer)
                        if train_config.enable_fsdp:
                            model.clip_grad_norm_(train_config.gradient_clipping_threshold)
                        else:
                            torch.nn.utils.clip_grad_norm_(
                                model.parameters(), train_config.gradient_clipping_threshold
                            )
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
            else:
                loss.backward()
                if should_step:
                    if train_config.gradient_clipping:
                        if train_config.enable_fsdp:
                            model.clip_grad_norm_(train_config.gradient_clipping_threshold)
                        else:
                            torch.nn.utils.clip_grad_norm_(
                                model.parameters(), train_config.gradient_clipping_threshold
                            )
                    optimizer.step()
                    optimizer.zero_grad()

        lr_scheduler.step()
        if train_config.enable_fsdp:
            dist.all_reduce(total_loss, op=dist.ReduceOp.SUM)
            total_loss = total_loss / dist.get_world_size()
        history.append((total_loss / total_length).item())
        if local_rank == 0:
            print(f"epoch {epoch}: mean loss {history[-1]:.4f}, lr {lr_scheduler.get_last_lr()[0]:.2e}")
    return history
