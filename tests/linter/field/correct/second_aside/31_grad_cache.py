"""
# style of: luyug/GradCache:src/grad_cache/grad_cache.py
# correct: the representations' gradients come from the scaled loss, so the surrogate's plain backward() already carries the scale; one unscale, step and update follow.
# torch: 1.10+
"""
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GradCache:
    """Contrastive loss over a big batch whose encoder passes run in small chunks."""

    def __init__(self, models, chunk_size, temperature=0.05, scaler=None):
        self.models = models
        self.chunk_size = chunk_size
        self.temperature = temperature
        self.scaler = scaler
        self.fp16 = scaler is not None

    def autocast(self):
        return torch.autocast("cuda", dtype=torch.float16) if self.fp16 else nullcontext()

    def compute_loss(self, reps):
        q, p = (F.normalize(r.float(), dim=-1) for r in reps)
        logits = q @ p.t() / self.temperature
        return F.cross_entropy(logits, torch.arange(len(q), device=q.device))

    @torch.no_grad()
    def forward_no_grad(self, model, chunks):
        out = []
        for chunk in chunks:
            with self.autocast():
                out.append(model(chunk))
        return torch.cat(out)

    def build_cache(self, reps):
        leaves = [r.detach().requires_grad_() for r in reps]
        loss = self.compute_loss(leaves)
        if self.fp16:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()
        return [leaf.grad for leaf in leaves], loss.detach()

    def forward_backward(self, model, chunks, cached):
        for chunk, grad in zip(chunks, cached):
            with self.autocast():
                rep = model(chunk)
            surrogate = torch.dot(rep.float().flatten(), grad.float().flatten())
            surrogate.backward()

    def __call__(self, *inputs: Tensor):
        chunked = [x.split(self.chunk_size) for x in inputs]
        reps = [self.forward_no_grad(m, c) for m, c in zip(self.models, chunked)]
        cache, loss = self.build_cache(reps)
        for model, chunks, grads in zip(self.models, chunked, cache):
            self.forward_backward(model, chunks, grads.split(self.chunk_size))
        return loss


def train(query_encoder: nn.Module, passage_encoder: nn.Module, loader, epochs=3, max_norm=2.0):
    models = [query_encoder.cuda().eval(), passage_encoder.cuda().eval()]  # no dropout: both passes must agree
    params = [p for m in models for p in m.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-5)
    scaler = torch.cuda.amp.GradScaler()
    gc = GradCache(models, chunk_size=16, scaler=scaler)
    for epoch in range(epochs):
        for query, passage in loader:
            optimizer.zero_grad()
            loss = gc(query.cuda(), passage.cuda())
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, max_norm)
            scaler.step(optimizer)
            scaler.update()
        print(epoch, loss.item())
