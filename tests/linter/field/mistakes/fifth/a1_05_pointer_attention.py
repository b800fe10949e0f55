# source: NVIDIA/apex issue #1052
# mistake: attention scores computed by matmul under float16 autocast are filled with -1e9, which half precision cannot hold: "value cannot be converted to type at::Half without overflow"
# severity: error
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

NEG = -1e9  # <- here


class PointerHead(nn.Module):
    """Chooses one passage sentence for every question token."""

    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.dim = dim

    def forward(self, question, sentences, sentence_is_pad):
        q = self.q(question)
        k = self.k(sentences)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.dim)
        scores = scores.masked_fill(sentence_is_pad[:, None, :], NEG)  # <- here
        return F.log_softmax(scores, dim=-1)


class Reader(nn.Module):
    def __init__(self, vocab, dim=256):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.rnn = nn.GRU(dim, dim // 2, num_layers=2, bidirectional=True, batch_first=True)
        self.head = PointerHead(dim)

    def forward(self, question, sentences, pad):
        q, _ = self.rnn(self.embed(question))
        b, n, t = sentences.shape
        s, _ = self.rnn(self.embed(sentences.view(b * n, t)))
        s = s.mean(1).view(b, n, -1)
        return self.head(q, s, pad)


def run_epoch(net, batches, opt, scaler, device):
    net.train()
    seen, total = 0, 0.0
    for question, sentences, pad, target in batches:
        question, sentences = question.to(device), sentences.to(device)
        pad, target = pad.to(device), target.to(device)
        opt.zero_grad(set_to_none=True)
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            logp = net(question, sentences, pad)
            loss = F.nll_loss(logp.flatten(0, 1), target.flatten(), ignore_index=-100)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        scaler.step(opt)
        scaler.update()
        total += loss.item() * len(target)
        seen += len(target)
    return total / max(seen, 1)


def train(batches, vocab, epochs=12, device="cuda"):
    net = Reader(vocab).to(device)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for e in range(epochs):
        print(e, run_epoch(net, batches, opt, scaler, device))
    return net
