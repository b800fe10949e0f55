# why correct: Accelerate divides the loss, owns the scaler and skips steps inside accumulate(); clipping goes through the accelerator, which unscales first
import math
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration


@dataclass
class Conf:
    lr: float = 5e-4
    accum: int = 4
    clip: float = 1.0
    epochs: int = 50
    precision: str = "fp16"
    out: str = "runs/tts"


class Acoustic(nn.Module):
    def __init__(self, vocab=200, dim=384, mels=80):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(dim, 4, 1536, batch_first=True), 6)
        self.dur = nn.Linear(dim, 1)
        self.mel = nn.Linear(dim, mels)

    def forward(self, ids, durations):
        h = self.enc(self.emb(ids))
        frames = [x.repeat_interleave(d, 0) for x, d in zip(h, durations)]
        frames = nn.utils.rnn.pad_sequence(frames, batch_first=True)
        return self.mel(frames), self.dur(h).squeeze(-1)


def objective(mel_hat, dur_hat, mel, durations):
    T = min(mel_hat.size(1), mel.size(1))
    l1 = F.l1_loss(mel_hat[:, :T].float(), mel[:, :T])
    return l1 + 0.1 * F.mse_loss(dur_hat.float(), torch.log1p(durations.float()))


def run(loader, conf=Conf()):
    acc = Accelerator(
        mixed_precision=conf.precision,
        gradient_accumulation_steps=conf.accum,
        project_config=ProjectConfiguration(project_dir=conf.out, automatic_checkpoint_naming=True),
    )
    net = Acoustic()
    opt = torch.optim.AdamW(net.parameters(), lr=conf.lr, betas=(0.9, 0.98))
    updates = conf.epochs * math.ceil(len(loader) / conf.accum)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=updates)
    net, opt, loader, sched = acc.prepare(net, opt, loader, sched)
    acc.print(asdict(conf))
    for epoch in range(conf.epochs):
        net.train()
        for ids, durations, mel in loader:
            with acc.accumulate(net):
                mel_hat, dur_hat = net(ids, durations)
                loss = objective(mel_hat, dur_hat, mel, durations)
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(net.parameters(), conf.clip)
                opt.step()
                sched.step()
                opt.zero_grad()
        mean = acc.gather(loss.detach().reshape(1)).mean()
        acc.print(epoch, mean.item())
        acc.save_state()
