import argparse
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchaudio
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from asr_data import Utterances, collate

NEG_INF = -1e9


class LogMel(nn.Module):
    def __init__(self):
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(16_000, n_fft=512, hop_length=160, n_mels=80)

    @torch.no_grad()
    def forward(self, wav):
        x = torch.log(self.mel(wav.float()) + 1e-10)
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-8)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads

    def forward(self, x, keep):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        w = (q @ k.transpose(-1, -2)) * q.size(-1) ** -0.5
        w = w.masked_fill(~keep[:, None, None], NEG_INF).softmax(-1)
        return self.out((w.to(v.dtype) @ v).transpose(1, 2).flatten(2))


class Transducer(nn.Module):
    def __init__(self, vocab, dim=320, depth=10, heads=4):
        super().__init__()
        self.sub = nn.Sequential(nn.Conv1d(80, dim, 3, 2, 1), nn.GELU(), nn.Conv1d(dim, dim, 3, 2, 1), nn.GELU())
        self.att = nn.ModuleList(Attention(dim, heads) for _ in range(depth))
        self.ff = nn.ModuleList(nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim)) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * depth))
        self.emb, self.pred = nn.Embedding(vocab, dim), nn.GRU(dim, dim, batch_first=True)
        self.join = nn.Linear(dim, vocab)

    def forward(self, mel, wav_len, text):
        x = self.sub(mel).transpose(1, 2)
        lens = ((wav_len // 160 + 1) + 3) // 4
        keep = torch.arange(x.size(1), device=x.device)[None] < lens[:, None]
        for i, (att, ff) in enumerate(zip(self.att, self.ff)):
            x = x + att(self.norms[2 * i](x), keep)
            x = x + ff(self.norms[2 * i + 1](x))
        p, _ = self.pred(self.emb(F.pad(text, (1, 0))))
        return self.join(torch.tanh(x[:, :, None] + p[:, None])), lens


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--manifest", default="manifests/train.tsv")
    ap.add_argument("--vocab", type=int, default=512)
    ap.add_argument("--accum", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=50)
    ap.add_argument("--ckpt", default="out/rnnt.ckpt")
    args = ap.parse_args()
    fabric = Fabric(accelerator="cuda", devices=4, strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(11)
    front = LogMel().to(fabric.device)
    model = Transducer(args.vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=1e-2, fused=True)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(Utterances(args.manifest), 8, shuffle=True, collate_fn=collate))
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if Path(args.ckpt).exists():
        fabric.load(args.ckpt, state)
        state["epoch"] += 1
    for epoch in range(state["epoch"], args.epochs):
        for i, (wav, wav_len, text, text_len) in enumerate(loader, start=1):
            hold = i % args.accum != 0
            with fabric.no_backward_sync(model, enabled=hold):
                joint, lens = model(front(wav), wav_len, text)
                loss = torchaudio.functional.rnnt_loss(
                    joint.float(), text.int(), lens.int(), text_len.int(), blank=0, clamp=1.0
                )
                fabric.backward(loss / args.accum)
            if hold:
                continue
            fabric.clip_gradients(model, optimizer, max_norm=5.0)
            optimizer.step()
            optimizer.zero_grad()
        fabric.print(f"epoch {epoch} loss {loss.item():.3f}")
        state["epoch"] = epoch
        fabric.save(args.ckpt, state)


if __name__ == "__main__":
    main()
