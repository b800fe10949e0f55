import argparse

import torch
import torch.nn as nn
import torchaudio
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

VOCAB = " 'ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CHAR2ID = {c: i + 1 for i, c in enumerate(VOCAB)}


class ConformerCTC(nn.Module):
    def __init__(self, n_mels=80, dim=256, layers=12):
        super().__init__()
        self.subsample = nn.Sequential(
            nn.Conv1d(n_mels, dim, 3, 2, 1), nn.ReLU(), nn.Conv1d(dim, dim, 3, 2, 1), nn.ReLU()
        )
        self.encoder = torchaudio.models.Conformer(dim, 4, 4 * dim, layers, 31)
        self.head = nn.Linear(dim, len(VOCAB) + 1)

    def forward(self, feats, lengths):
        x = self.subsample(feats.transpose(1, 2)).transpose(1, 2)
        lengths = (lengths + 3) // 4
        x, lengths = self.encoder(x, lengths)
        return self.head(x), lengths


mel = torchaudio.transforms.MelSpectrogram(16000, n_fft=400, hop_length=160, n_mels=80)


def collate(batch):
    feats, targets = [], []
    for wav, _, text, *_ in batch:
        feats.append(mel(wav[0]).clamp_min(1e-5).log().t())
        targets.append(torch.tensor([CHAR2ID[c] for c in text if c in CHAR2ID]))
    f_len = torch.tensor([f.size(0) for f in feats])
    t_len = torch.tensor([t.numel() for t in targets])
    return pad_sequence(feats, True), f_len, pad_sequence(targets, True), t_len


def train_epoch(model, loader, optimizer, scaler, ctc, args):
    model.train()
    running, count = 0.0, 0
    optimizer.zero_grad(set_to_none=True)
    for i, (feats, f_len, targets, t_len) in enumerate(loader):
        feats, f_len = feats.cuda(), f_len.cuda()
        targets, t_len = targets.cuda(), t_len.cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            logits, out_len = model(feats, f_len)
        log_probs = logits.float().log_softmax(-1).transpose(0, 1)
        loss = ctc(log_probs, targets, out_len, t_len)
        loss = scaler.scale(loss)
        loss.backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        running += loss.item() * feats.size(0)  # <- here
        count += feats.size(0)
        if i % 100 == 0:
            print(f"iter {i} loss {running / count:.4f}")
    return running / count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="/data/librispeech")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--clip", type=float, default=5.0)
    args = parser.parse_args()
    data = torchaudio.datasets.LIBRISPEECH(args.root, "train-clean-100")
    loader = DataLoader(data, 16, shuffle=True, collate_fn=collate, num_workers=8)
    model = ConformerCTC().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    scaler = torch.amp.GradScaler("cuda")
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)
    for epoch in range(args.epochs):
        avg = train_epoch(model, loader, optimizer, scaler, ctc, args)
        scheduler.step(avg)
        print(f"epoch {epoch} avg loss {avg:.4f} lr {optimizer.param_groups[0]['lr']:.2e}")


if __name__ == "__main__":
    main()
