"""
# source: https://github.com/NVIDIA/OpenSeq2Seq/pull/127
# mistake: the data loss is scaled but the regulariser's backward is not, so after unscaling the regulariser is weaker by the whole loss scale.
# severity: error
# torch: any
"""
import argparse

import torch
import torch.nn.functional as F
from torch import nn

from librispeech import make_loader


class JasperBlock(nn.Module):
    def __init__(self, cin, cout, kernel, dropout):
        super().__init__()
        self.conv = nn.Conv1d(cin, cout, kernel, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm1d(cout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(F.relu(self.bn(self.conv(x))))


class Jasper(nn.Module):
    def __init__(self, n_mels=64, vocab=29):
        super().__init__()
        sizes = [(n_mels, 256, 11), (256, 256, 11), (256, 384, 13), (384, 512, 17), (512, 768, 25)]
        self.encoder = nn.Sequential(*(JasperBlock(a, b, k, 0.2) for a, b, k in sizes))
        self.decoder = nn.Conv1d(768, vocab, 1)

    def forward(self, mel):
        return self.decoder(self.encoder(mel)).permute(2, 0, 1)


def l2_penalty(model, weight):
    return weight * sum(p.pow(2).sum() for n, p in model.named_parameters() if n.endswith("conv.weight"))


def train_step(model, batch, optimizer, scaler, args):
    mel, mel_len, text, text_len = (t.cuda() for t in batch)
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=args.mixed):
        log_probs = F.log_softmax(model(mel).float(), dim=-1)
        loss = F.ctc_loss(log_probs, text, mel_len, text_len, zero_infinity=True)
    scaler.scale(loss).backward()
    penalty = l2_penalty(model, args.l2)
    penalty.backward()  # <- here
    scaler.step(optimizer)
    scaler.update()
    return loss.item(), penalty.item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--l2", type=float, default=1e-3)
    p.add_argument("--mixed", action="store_true")
    p.add_argument("--epochs", type=int, default=50)
    args = p.parse_args()
    model = Jasper().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.95)
    scaler = torch.amp.GradScaler("cuda", enabled=args.mixed)
    for epoch in range(args.epochs):
        model.train()
        for batch in make_loader("train-clean-360"):
            loss, penalty = train_step(model, batch, optimizer, scaler, args)
        print(f"{epoch}: ctc {loss:.3f} l2 {penalty:.3f}")


if __name__ == "__main__":
    main()
