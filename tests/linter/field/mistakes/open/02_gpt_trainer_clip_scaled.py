# source: https://github.com/pytorch/examples/issues/1196
# mistake: the AMP branch clips right after the scaled backward without unscale_, so grad_norm_clip is compared with gradients multiplied by the loss scale.
# severity: error
# torch: any
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class TrainerConfig:
    max_epochs: int = 10
    grad_norm_clip: float = 1.0
    use_amp: bool = False


class Trainer:
    def __init__(self, cfg: TrainerConfig, model, optimizer, loader, local_rank: int):
        self.cfg = cfg
        self.rank = local_rank
        self.loader = loader
        self.optimizer = optimizer
        self.model = DDP(model.to(local_rank), device_ids=[local_rank])
        if cfg.use_amp:
            self.scaler = torch.amp.GradScaler("cuda")

    def _run_batch(self, tokens, targets, train: bool):
        with torch.set_grad_enabled(train), torch.amp.autocast("cuda", dtype=torch.float16, enabled=self.cfg.use_amp):
            _, loss = self.model(tokens, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            if self.cfg.use_amp:
                self.scaler.scale(loss).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.grad_norm_clip)  # <- here
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.grad_norm_clip)
                self.optimizer.step()
        return loss.item()

    def train(self):
        for epoch in range(self.cfg.max_epochs):
            self.loader.sampler.set_epoch(epoch)
            for it, (tokens, targets) in enumerate(self.loader):
                value = self._run_batch(tokens.to(self.rank), targets.to(self.rank), train=True)
                if it % 100 == 0:
                    print(f"[rank{self.rank}] epoch {epoch} iter {it} loss {value:.5f}")
