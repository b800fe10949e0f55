# source: https://github.com/huggingface/transformers/pull/21428
# mistake: loss scaling is switched on for every half-precision backend, also when the chosen autocast dtype is bfloat16.
# severity: warning
# torch: any
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class TrainingArguments:
    fp16: bool = False
    bf16: bool = False
    learning_rate: float = 5e-5
    max_grad_norm: float = 1.0
    num_train_epochs: int = 3


class SeqTrainer:
    def __init__(self, model: nn.Module, args: TrainingArguments, train_loader):
        self.model = model.cuda()
        self.args = args
        self.loader = train_loader
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
        self.use_amp = args.fp16 or args.bf16
        self.do_grad_scaling = False
        self.amp_dtype = torch.float32
        if self.use_amp:
            self.amp_dtype = torch.bfloat16 if args.bf16 else torch.float16
            self.do_grad_scaling = True  # <- here
            self.scaler = torch.amp.GradScaler("cuda")  # <- here

    def autocast(self):
        return torch.autocast("cuda", dtype=self.amp_dtype, enabled=self.use_amp)

    def training_step(self, inputs):
        self.model.train()
        with self.autocast():
            loss = self.model(**inputs).loss
        if self.do_grad_scaling:
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
        else:
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        if self.do_grad_scaling:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def train(self):
        for _ in range(self.args.num_train_epochs):
            for batch in self.loader:
                self.training_step({k: v.cuda() for k, v in batch.items()})
