# source: https://github.com/espnet/espnet/pull/1705
# mistake: apex's amp state (loss scaler) is neither saved nor restored with the checkpoint, so resuming restarts the dynamic loss scale.
# severity: warning
import argparse
import glob
import os

import torch
from apex import amp
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

from voice.dataset import MelSet, pad_batch
from voice.model import Synth
from voice.losses import mel_gate_loss


def newest(folder):
    found = sorted(glob.glob(os.path.join(folder, "step_*.pth")))
    return found[-1] if found else None


def save_all(folder, step, model, optimizer):
    path = os.path.join(folder, "step_%08d.pth" % step)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)  # <- here
    return path


def load_all(path, model, optimizer):
    blob = torch.load(path, map_location="cpu")
    model.load_state_dict(blob["model"])
    optimizer.load_state_dict(blob["optimizer"])  # <- here
    return blob["step"]


def train(hp):
    torch.backends.cudnn.benchmark = True
    os.makedirs(hp.folder, exist_ok=True)
    writer = SummaryWriter(hp.folder)
    loader = DataLoader(MelSet(hp.filelist), batch_size=hp.batch, shuffle=True, num_workers=4,
                        collate_fn=pad_batch, drop_last=True, pin_memory=True)

    model = Synth(hp.symbols, hp.mels).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=hp.lr, weight_decay=1e-6)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")  # <- here

    step = 0
    latest = newest(hp.folder)
    if latest:
        step = load_all(latest, model, optimizer)
        print("continuing from", latest)

    model.train()
    while step < hp.steps:
        for text, text_len, mel, mel_len, gate in loader:
            text, mel, gate = text.cuda(), mel.cuda(), gate.cuda()
            pred_mel, pred_gate = model(text, text_len, mel, mel_len)
            loss = mel_gate_loss(pred_mel, pred_gate, mel, gate)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), hp.clip)
            optimizer.step()
            step += 1
            writer.add_scalar("train/loss", loss.item(), step)
            writer.add_scalar("train/grad_norm", float(norm), step)
            if step % hp.save_every == 0:
                print("wrote", save_all(hp.folder, step, model, optimizer))
            if step >= hp.steps:
                break


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("filelist")
    ap.add_argument("folder")
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--steps", type=int, default=200000)
    ap.add_argument("--save_every", type=int, default=2000)
    ap.add_argument("--symbols", type=int, default=148)
    ap.add_argument("--mels", type=int, default=80)
    train(ap.parse_args())
