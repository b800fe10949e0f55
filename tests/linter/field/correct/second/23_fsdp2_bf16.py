"""
# style of: pytorch/torchtitan:torchtitan/train.py
# correct: fully_shard with a bfloat16 policy keeps float32 shards and needs neither autocast nor a scaler; clip_grad_norm_ on DTensors computes the global norm.
# torch: 2.6+
"""
import os
import time

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from llama_model import ModelArgs, Transformer
from text import build_loader


class Trainer:
    def __init__(self, job):
        self.job = job
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
        with torch.device("meta"):
            model = Transformer(ModelArgs(dim=2048, layers=24))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.layers.values():
            fully_shard(block, mesh=self.mesh, mp_policy=policy)
        fully_shard(model, mesh=self.mesh, mp_policy=policy)
        model.to_empty(device="cuda")
        model.init_weights()
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, betas=(0.9, 0.95), fused=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda s: min(1.0, (s + 1) / job.warmup) * max(0.0, 1 - s / job.steps)
        )
        self.loader = build_loader(job.dataset, job.batch, job.seq_len, self.mesh)
        self.step = 0

    def train_step(self, data):
        self.optimizer.zero_grad()
        total = torch.zeros((), device="cuda")
        for i in range(self.job.accumulation):
            tokens, labels = (t.cuda(non_blocking=True) for t in next(data))
            last = i == self.job.accumulation - 1
            self.model.set_requires_gradient_sync(last)
            logits = self.model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) / self.job.accumulation
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.max_norm, foreach=True)
        self.optimizer.step()
        self.scheduler.step()
        return total, norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def checkpoint(self, load=False):
        model_sd, optim_sd = get_state_dict(self.model, self.optimizer)
        state = {"model": model_sd, "optim": optim_sd}
        if load:
            dcp.load(state, checkpoint_id=self.job.folder)
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
            )
        else:
            dcp.save(state, checkpoint_id=f"{self.job.folder}/step-{self.step}")

    def train(self):
        data, tick = iter(self.loader), time.perf_counter()
        while self.step < self.job.steps:
            self.step += 1
            loss, norm = self.train_step(data)
            if self.step % 10 == 0 and self.mesh.get_rank() == 0:
                print(f"step {self.step} loss {loss.item():.4f} norm {norm.item():.3f} {time.perf_counter() - tick:.0f}s")
            if self.step % 1000 == 0:
                self.checkpoint()
