# re-expressed from github.com/facebookresearch/fairseq issue 3575: padding mask constant for the attention scores is outside the float16 range
import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from speech_data import CharTokenizer, LibriManifest, pad_collate


def lengths_to_mask(lengths, max_len):
    return torch.arange(max_len, device=lengths.device)[None, :] < lengths[:, None]


class RelativeBiasAttention(nn.Module):
    def __init__(self, dim, heads, max_rel=128, dropout=0.1):
        super().__init__()
        self.heads, self.max_rel = heads, max_rel
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.rel = nn.Embedding(2 * max_rel + 1, heads)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, keep):
        b, t, d = x.shape
        q = self.q(x).view(b, t, self.heads, -1).transpose(1, 2)
        k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.kv(x).chunk(2, dim=-1))
        pos = torch.arange(t, device=x.device)
        rel = (pos[None] - pos[:, None]).clamp(-self.max_rel, self.max_rel) + self.max_rel
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
        scores = scores + self.rel(rel).permute(2, 0, 1).to(scores.dtype)
        scores = scores.masked_fill(~keep[:, None, None, :], -1e9)  # <- here
        att = self.drop(scores.softmax(dim=-1))
        return self.o(torch.matmul(att, v).transpose(1, 2).reshape(b, t, d))


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, kernel=15, dropout=0.1):
        super().__init__()
        self.att, self.n1 = RelativeBiasAttention(dim, heads, dropout=dropout), nn.LayerNorm(dim)
        self.conv, self.n2 = nn.Conv1d(dim, dim, kernel, padding=kernel // 2, groups=dim), nn.LayerNorm(dim)
        self.ff, self.n3 = nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim)), nn.LayerNorm(dim)

    def forward(self, x, keep):
        x = x + self.att(self.n1(x), keep)
        h = self.n2(x) * keep[..., None]
        x = x + F.silu(self.conv(h.transpose(1, 2)).transpose(1, 2))
        return x + self.ff(self.n3(x))


class CTCModel(nn.Module):
    def __init__(self, vocab, mels=80, dim=384, depth=12, heads=6):
        super().__init__()
        self.sub = nn.Sequential(nn.Conv1d(mels, dim, 3, 2, 1), nn.GELU(), nn.Conv1d(dim, dim, 3, 2, 1), nn.GELU())
        self.layers = nn.ModuleList(EncoderLayer(dim, heads) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, mel, lengths):
        x = self.sub(mel.transpose(1, 2)).transpose(1, 2)
        lengths = (lengths + 3) // 4
        keep = lengths_to_mask(lengths, x.size(1))
        for layer in self.layers:
            x = layer(x, keep)
        return self.head(x), lengths


def run_epoch(model, loader, optimizer, scheduler, scaler, device):
    model.train()
    for i, (mel, mel_len, text, text_len) in enumerate(loader):
        mel, mel_len, text = mel.to(device), mel_len.to(device), text.to(device)
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            logits, out_len = model(mel, mel_len)
        logp = logits.float().log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(logp, text, out_len.cpu(), text_len, blank=0, zero_infinity=True)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if i % 50 == 0:
            print(f"  {i:5d} ctc {loss.item():.3f} lr {scheduler.get_last_lr()[0]:.2e}")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--manifest", default="manifests/train-clean-360.tsv")
    p.add_argument("--epochs", type=int, default=40)
    a = p.parse_args()
    tok = CharTokenizer()
    loader = DataLoader(LibriManifest(a.manifest, tok), 32, shuffle=True, num_workers=8, collate_fn=pad_collate)
    model = CTCModel(len(tok)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, epochs=a.epochs, steps_per_epoch=len(loader))
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(a.epochs):
        print(f"epoch {epoch}")
        run_epoch(model, loader, optimizer, scheduler, scaler, torch.device("cuda"))
        torch.save(model.state_dict(), f"asr_{epoch:02d}.pt")
