# why correct: a shrinking scale tells that scaler.step skipped the optimizer, so schedule and averaged model advance on real updates only; losses are logged before scaling
import logging

import torch
import torch.nn as nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

log = logging.getLogger("punct")


class Punctuator(nn.Module):
    def __init__(self, vocab=30_000, marks=5, dim=320):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, 3, bidirectional=True, batch_first=True, dropout=0.2)
        self.out = nn.Linear(2 * dim, marks)

    def forward(self, words):
        return self.out(self.gru(self.emb(words))[0])


class Loop:
    def __init__(self, net, total, lr=2e-3):
        self.net = net.cuda()
        self.ema = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=lr)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, max_lr=lr, total_steps=total)
        self.scaler = torch.amp.GradScaler("cuda")
        self.loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 1.0, 2.0, 2.0], device="cuda"))
        self.meter = torch.zeros((), device="cuda")

    def forward_loss(self, words, marks):
        with torch.autocast("cuda", dtype=torch.float16):
            return self.loss_fn(self.net(words).flatten(0, 1), marks.flatten())

    def update(self, words, marks):
        loss = self.forward_loss(words, marks)
        self.meter += loss.detach()
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_value_(self.net.parameters(), 0.5)
        scale = self.scaler.get_scale()
        self.scaler.step(self.opt)
        self.scaler.update()
        if self.scaler.get_scale() < scale:
            log.info("overflow at scale %g, step skipped", scale)
            return
        self.sched.step()
        self.ema.update_parameters(self.net)

    def run(self, batches):
        self.net.train()
        for i, (words, marks) in enumerate(batches, 1):
            self.update(words.cuda(), marks.cuda())
            if i % 200 == 0:
                log.info("%d loss %.4f lr %.2e", i, self.meter.item() / 200, self.sched.get_last_lr()[0])
                self.meter.zero_()
        keep = ("net", "ema", "opt", "sched", "scaler")
        torch.save({k: getattr(self, k).state_dict() for k in keep}, "punct.pt")
