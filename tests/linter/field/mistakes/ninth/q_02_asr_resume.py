# source: https://github.com/ultralytics/ultralytics/pull/22189
# mistake: the checkpoint holds model, optimizer and schedule but not the GradScaler, so a resumed run restarts from the default scale
# severity: warning
import argparse
import pathlib

import torch
from torch import nn
from torch.utils.data import DataLoader


class TinyConformer(nn.Module):
    def __init__(self, n_mels=80, dim=256, vocab=512, layers=6):
        super().__init__()
        self.inp = nn.Linear(n_mels, dim)
        block = nn.TransformerEncoderLayer(dim, 4, dim * 4, batch_first=True)
        self.enc = nn.TransformerEncoder(block, layers)
        self.out = nn.Linear(dim, vocab)

    def forward(self, feats):
        return self.out(self.enc(self.inp(feats)))


def store(path, net, opt, sched, epoch):  # <- here
    torch.save({  # <- here
        "epoch": epoch,
        "net": net.state_dict(),
        "opt": opt.state_dict(),
        "sched": sched.state_dict(),
    }, path)  # <- here


def restore(path, net, opt, sched):  # <- here
    blob = torch.load(path, map_location="cpu", weights_only=True)  # <- here
    net.load_state_dict(blob["net"])
    opt.load_state_dict(blob["opt"])
    sched.load_state_dict(blob["sched"])
    return blob["epoch"] + 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--manifest", required=True)
    ap.add_argument("--work-dir", type=pathlib.Path, default=pathlib.Path("exp/asr"))
    ap.add_argument("--epochs", type=int, default=80)
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()

    dataset = torch.load(args.manifest, weights_only=False)
    loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=8, collate_fn=dataset.collate)
    net = TinyConformer().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-2)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.epochs)
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)
    scaler = torch.amp.GradScaler("cuda")  # <- here

    args.work_dir.mkdir(parents=True, exist_ok=True)
    ckpt = args.work_dir / "last.pt"
    first = restore(ckpt, net, opt, sched) if args.resume and ckpt.exists() else 0  # <- here

    for epoch in range(first, args.epochs):
        net.train()
        for feats, feat_len, tokens, token_len in loader:
            feats, tokens = feats.cuda(), tokens.cuda()
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                logits = net(feats)
            logp = logits.float().log_softmax(-1).transpose(0, 1)
            loss = ctc(logp, tokens, feat_len, token_len)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            scaler.step(opt)
            scaler.update()
        sched.step()
        store(ckpt, net, opt, sched, epoch)  # <- here


if __name__ == "__main__":
    main()
