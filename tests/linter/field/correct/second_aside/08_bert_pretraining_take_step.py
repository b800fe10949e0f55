"""
# style of: NVIDIA/DeepLearningExamples:PyTorch/LanguageModeling/BERT/run_pretraining.py
# correct: no_sync on all but the last micro batch of the window; unscale, clip, step and update only in take_optimizer_step, which tells by the scale whether the step counts.
# torch: 1.10+
"""
import contextlib

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from modeling import BertForPreTraining, BertPretrainingCriterion
from optimization import PolyWarmUpScheduler
from shards import shard_loaders


def prepare_model_and_optimizer(args, config, device):
    model = BertForPreTraining(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    lr_scheduler = PolyWarmUpScheduler(optimizer, warmup=args.warmup_proportion, total_steps=args.max_steps)
    grad_scaler = torch.cuda.amp.GradScaler(init_scale=args.init_loss_scale, enabled=args.fp16)
    criterion = BertPretrainingCriterion(config.vocab_size)
    global_step = 0
    if args.resume_from_checkpoint:
        checkpoint = torch.load(args.resume_path, map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        grad_scaler.load_state_dict(checkpoint["grad_scaler"])
        global_step = checkpoint["step"]
    model = DDP(model, device_ids=[args.local_rank], gradient_as_bucket_view=True)
    return model, optimizer, grad_scaler, lr_scheduler, criterion, global_step


def take_training_step(args, grad_scaler, model, criterion, batch):
    with torch.cuda.amp.autocast(enabled=args.fp16):
        scores, seq_score = model(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])
        loss = criterion(scores, seq_score, batch["labels"], batch["next_sentence_labels"])
    step_loss = loss.detach()
    grad_scaler.scale(loss / args.gradient_accumulation_steps).backward()
    return step_loss


def take_optimizer_step(args, optimizer, grad_scaler, model, lr_scheduler, global_step):
    if args.max_grad_norm:
        grad_scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    scale = grad_scaler.get_scale()
    grad_scaler.step(optimizer)
    grad_scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if grad_scaler.get_scale() < scale:
        return global_step
    lr_scheduler.step()
    return global_step + 1


def main(args, config, device):
    model, optimizer, grad_scaler, lr_scheduler, criterion, global_step = prepare_model_and_optimizer(
        args, config, device
    )
    micro = 0
    while global_step < args.max_steps:
        for loader in shard_loaders(args):
            for batch in loader:
                micro += 1
                batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
                boundary = micro % args.gradient_accumulation_steps == 0
                with contextlib.nullcontext() if boundary else model.no_sync():
                    step_loss = take_training_step(args, grad_scaler, model, criterion, batch)
                if boundary:
                    global_step = take_optimizer_step(args, optimizer, grad_scaler, model, lr_scheduler, global_step)
                    if args.local_rank == 0 and global_step % args.log_freq == 0:
                        print(global_step, step_loss.item(), grad_scaler.get_scale())
                if global_step >= args.max_steps:
                    break
            if args.local_rank == 0:
                torch.save(
                    {
                        "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "grad_scaler": grad_scaler.state_dict(),
                        "step": global_step,
                    },
                    args.resume_path,
                )
            if global_step >= args.max_steps:
                return
