# why correct: the gradients are still scaled when clipped, but the threshold is multiplied by the same current scale, and step() still unscales and checks for infs
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class CharLSTM(nn.Module):
    def __init__(self, vocab=128, dim=512, layers=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.LSTM(dim, dim, layers, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, x, state=None):
        h, state = self.rnn(self.emb(x), state)
        return self.out(h), state


def detach(state):
    return tuple(s.detach() for s in state)


def windows(ids, batch, bptt):
    n = ids.numel() // batch
    ids = ids[: n * batch].view(batch, n)
    for i in range(0, n - 1, bptt):
        w = min(bptt, n - 1 - i)
        yield ids[:, i:i + w], ids[:, i + 1:i + 1 + w]


def run_epoch(model, ids, args, opt, scaler):
    model.train()
    state, tot, cnt = None, 0.0, 0
    for x, y in windows(ids, args.batch, args.bptt):
        with torch.autocast("cuda", dtype=torch.float16):
            logits, state = model(x, state)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        state = detach(state)
        opt.zero_grad()
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip * scaler.get_scale())
        scaler.step(opt)
        scaler.update()
        tot += loss.item() * y.numel()
        cnt += y.numel()
    return tot / cnt


def main():
    p = argparse.ArgumentParser()
    p.add_argument("text")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--bptt", type=int, default=128)
    p.add_argument("--clip", type=float, default=0.25)
    p.add_argument("--epochs", type=int, default=10)
    args = p.parse_args()
    raw = open(args.text, "rb").read()
    ids = torch.tensor([b & 127 for b in raw], device="cuda")
    model = CharLSTM().cuda()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cuda")
    for e in range(args.epochs):
        print(e, run_epoch(model, ids, args, opt, scaler))


if __name__ == "__main__":
    main()
