# source: NVIDIA/OpenSeq2Seq PR #127 https://github.com/NVIDIA/OpenSeq2Seq/pull/127
# mistake: the smoothness regularizer is back-propagated without the loss scale into gradients that are later unscaled, so it practically vanishes
# severity: error
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast

settings = {
    "lr": 1e-3,
    "reg": 1e-4,
    "clip": 10.0,
    "epochs": 30,
    "vocab": 29,
    "features": 64,
}


class JasperLite(nn.Module):
    def __init__(self, feats, vocab):
        super().__init__()
        width = [feats, 256, 256, 384, 512]
        self.convs = nn.ModuleList(nn.Conv1d(i, o, 11, padding=5) for i, o in zip(width, width[1:]))
        self.norms = nn.ModuleList(nn.BatchNorm1d(o) for o in width[1:])
        self.out = nn.Conv1d(width[-1], vocab, 1)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms):
            x = F.relu(norm(conv(x)))
        return self.out(x)

    def weight_energy(self):
        return sum(c.weight.square().sum() for c in self.convs)


def ctc(logits, texts, text_len, frame_len):
    logp = logits.float().permute(2, 0, 1).log_softmax(-1)
    return F.ctc_loss(logp, texts, frame_len, text_len, zero_infinity=True)


def train_epoch(net, opt, scaler, batches):
    net.train()
    running = 0.0
    for audio, frame_len, texts, text_len in batches:
        audio, texts = audio.cuda(), texts.cuda()
        opt.zero_grad(set_to_none=True)
        with autocast("cuda", dtype=torch.float16):
            logits = net(audio)
        loss = ctc(logits, texts, text_len, frame_len)
        penalty = settings["reg"] * net.weight_energy()
        scaler.scale(loss).backward()
        penalty.backward()  # <- here
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), settings["clip"])
        scaler.step(opt)
        scaler.update()
        running += (loss + penalty).item()
    return running / len(batches)


def main():
    from librispeech import bucketed

    net = JasperLite(settings["features"], settings["vocab"]).cuda()
    opt = torch.optim.SGD(net.parameters(), lr=settings["lr"], momentum=0.95)
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, settings["epochs"], power=2)
    scaler = GradScaler("cuda", init_scale=2.0 ** 14)
    for epoch in range(settings["epochs"]):
        print(epoch, train_epoch(net, opt, scaler, bucketed("train-clean-360")))
        sched.step()
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "scaler": scaler.state_dict()}, "asr.pt")


if __name__ == "__main__":
    main()
