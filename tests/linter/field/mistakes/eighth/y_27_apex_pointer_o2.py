# source: https://github.com/NVIDIA/apex/issues/379
# mistake: in a model run as float16 (apex O2) log is taken of softmax output; probabilities below 6e-8 become 0, the log is -inf and the loss scale collapses.
# severity: error
import random
from collections import deque

import torch
import torch.nn as nn
from apex import amp
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from headline.corpus import HeadlineCorpus

PAD, BOS, EOS = 0, 1, 2


class Encoder(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.rnn = nn.LSTM(dim, dim // 2, batch_first=True, bidirectional=True, num_layers=2)

    def forward(self, src):
        out, _ = self.rnn(self.emb(src))
        return out


class Decoder(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.rnn = nn.LSTM(dim, dim, batch_first=True)
        self.att = nn.Linear(dim, dim, bias=False)
        self.mix = nn.Linear(2 * dim, dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, memory, tgt):
        h, _ = self.rnn(self.emb(tgt))
        weight = torch.softmax(torch.bmm(self.att(h), memory.transpose(1, 2)), dim=-1)
        h = torch.tanh(self.mix(torch.cat([h, torch.bmm(weight, memory)], dim=-1)))
        prob = torch.softmax(self.out(h), dim=-1)  # <- here
        return torch.log(prob)  # <- here


class HeadlineModel(nn.Module):
    def __init__(self, vocab, dim=512):
        super().__init__()
        self.encoder = Encoder(vocab, dim)
        self.decoder = Decoder(vocab, dim)

    def forward(self, src, tgt):
        return self.decoder(self.encoder(src), tgt)


def collate(rows):
    src = pad_sequence([torch.tensor(r[0]) for r in rows], batch_first=True, padding_value=PAD)
    tgt = pad_sequence([torch.tensor([BOS] + r[1] + [EOS]) for r in rows], batch_first=True, padding_value=PAD)
    return src, tgt


def main(path="gigaword", epochs=10, batch=64, lr=5e-4, seed=1):
    random.seed(seed)
    torch.manual_seed(seed)
    corpus = HeadlineCorpus(path)
    loader = DataLoader(corpus.train, batch, shuffle=True, collate_fn=collate, num_workers=2)
    model = HeadlineModel(len(corpus.vocab)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")  # <- here
    criterion = nn.NLLLoss(ignore_index=PAD)

    recent = deque(maxlen=200)
    for epoch in range(epochs):
        model.train()
        for it, (src, tgt) in enumerate(loader):
            src, tgt = src.cuda(), tgt.cuda()
            logp = model(src, tgt[:, :-1])
            loss = criterion(logp.float().transpose(1, 2), tgt[:, 1:])
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 2.0)
            optimizer.step()
            recent.append(loss.item())
            if it % 200 == 0:
                print("epoch %d it %d loss %.4f" % (epoch, it, sum(recent) / len(recent)))
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "amp": amp.state_dict()}, "headline_%d.pt" % epoch)


if __name__ == "__main__":
    main()
