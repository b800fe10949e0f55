# why correct: bfloat16 autocast over float32 weights needs no loss scaling; log-likelihood, running sums and the numpy report are float32
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Basecaller(nn.Module):
    def __init__(self, states=5, width=384):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(1, 64, 5, padding=2), nn.SiLU(),
            nn.Conv1d(64, width, 19, stride=5, padding=9), nn.SiLU())
        self.lstm = nn.LSTM(width, width, num_layers=3, batch_first=True)
        self.out = nn.Linear(width, states)

    def forward(self, signal):
        h, _ = self.lstm(self.conv(signal.unsqueeze(1)).transpose(1, 2))
        return self.out(h)


def ctc(logits, targets, lengths):
    logp = F.log_softmax(logits.float(), -1).transpose(0, 1)
    steps = torch.full((logp.size(1),), logp.size(0), dtype=torch.long)
    return F.ctc_loss(logp, targets, steps, lengths, zero_infinity=True)


def one_epoch(net, loader, opt, sched):
    net.train()
    total = torch.zeros((), device="cuda", dtype=torch.float64)
    for n, (signal, targets, lengths) in enumerate(loader, 1):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = net(signal.cuda(non_blocking=True))
        loss = ctc(logits, targets.cuda(), lengths)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        total += loss.detach()
    return (total / n).item()


@torch.inference_mode()
def posterior(net, signal):
    net.eval()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = net(signal.cuda())
    return torch.softmax(logits.float(), -1).cpu().numpy()


def greedy(post: np.ndarray):
    best = post.argmax(-1)
    reads = []
    for row in best:
        keep = np.r_[True, row[1:] != row[:-1]] & (row != 0)
        reads.append("".join("NACGT"[i] for i in row[keep]))
    return reads


def main(train_dl, val_dl, epochs=15):
    net = Basecaller().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 2e-3, total_steps=epochs * len(train_dl))
    for epoch in range(epochs):
        loss = one_epoch(net, train_dl, opt, sched)
        sample = next(iter(val_dl))[0]
        print(epoch, f"{loss:.4f}", greedy(posterior(net, sample))[0][:60])
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict()}, "caller.pt")
