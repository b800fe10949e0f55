"""
# source: https://github.com/modelscope/FunASR/pull/3472
# mistake: no_sync() is chosen by batch_idx % accum_grad but the step by (batch_idx + 1) % accum_grad: the last micro batch of each window is not reduced, so the ranks step with different gradients and find overflows apart.
# severity: error
# torch: any (DDP)
"""
import contextlib
import logging

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, local_rank, use_fp16=True, accum_grad=4, grad_clip=10.0, max_epoch=70, output_dir="./"):
        self.local_rank = local_rank
        self.use_fp16 = use_fp16
        self.accum_grad = accum_grad
        self.grad_clip = grad_clip
        self.max_epoch = max_epoch
        self.output_dir = output_dir

    def wrap(self, model):
        model = model.cuda(self.local_rank)
        return DDP(model, device_ids=[self.local_rank], find_unused_parameters=False)

    def train_epoch(self, model, optim, scheduler, scaler, dataloader, epoch):
        model.train()
        optim.zero_grad()
        for batch_idx, batch in enumerate(dataloader):
            batch = {k: v.cuda(self.local_rank) for k, v in batch.items()}
            my_context = contextlib.nullcontext
            if self.accum_grad > 1:
                my_context = model.no_sync if batch_idx % self.accum_grad != 0 else my_context  # <- here
            with my_context():
                with torch.cuda.amp.autocast(enabled=self.use_fp16):
                    loss, stats, weight = model(**batch)
                loss = loss / self.accum_grad
                scaler.scale(loss).backward()

            if (batch_idx + 1) % self.accum_grad == 0:
                if self.grad_clip > 0:
                    scaler.unscale_(optim)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), self.grad_clip)
                scale = scaler.get_scale()
                scaler.step(optim)
                scaler.update()
                if scaler.get_scale() >= scale:
                    scheduler.step()
                optim.zero_grad(set_to_none=True)
                if self.local_rank == 0 and (batch_idx + 1) % (50 * self.accum_grad) == 0:
                    logging.info("epoch %d, batch %d, loss %.4f", epoch, batch_idx, loss.item() * self.accum_grad)

    def run(self, model, optim_fn, scheduler_fn, dataloader):
        model = self.wrap(model)
        optim = optim_fn(model.parameters())
        scheduler = scheduler_fn(optim)
        scaler = torch.cuda.amp.GradScaler(enabled=self.use_fp16)
        for epoch in range(self.max_epoch):
            self.train_epoch(model, optim, scheduler, scaler, dataloader, epoch)
            if self.local_rank == 0:
                state = {"model": model.module.state_dict(), "optim": optim.state_dict(), "scaler": scaler.state_dict()}
                torch.save(state, f"{self.output_dir}/model.pt.ep{epoch}")
