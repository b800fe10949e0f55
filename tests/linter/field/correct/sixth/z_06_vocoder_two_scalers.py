# why correct: each player of the GAN has its own scaler, which alone scales, steps and updates it, so two update() calls per iteration don't interfere
import argparse
import os

import torch
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast


def set_grad(net, flag):
    for p in net.parameters():
        p.requires_grad_(flag)


def hinge_d(real, fake):
    return sum(F.relu(1 - r.float()).mean() + F.relu(1 + f.float()).mean() for r, f in zip(real, fake))


def hinge_g(fake):
    return sum(-f.float().mean() for f in fake)


def save(path, step, **parts):
    torch.save({"step": step, **{k: v.state_dict() for k, v in parts.items()}}, path)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--wavs", required=True)
    ap.add_argument("--out", default="voc")
    ap.add_argument("--steps", type=int, default=500_000)
    ap.add_argument("--start-adv", type=int, default=100_000)
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)

    from vocoder import Generator, MultiScaleDiscriminator, StftLoss, wav_loader

    g, d, stft = Generator().cuda(), MultiScaleDiscriminator().cuda(), StftLoss().cuda()
    og = torch.optim.Adam(g.parameters(), 1e-4, betas=(0.5, 0.9))
    od = torch.optim.Adam(d.parameters(), 5e-5, betas=(0.5, 0.9))
    sg, sd = GradScaler(), GradScaler()

    step = 0
    while step < a.steps:
        for mel, wav in wav_loader(a.wavs):
            mel, wav = mel.cuda(non_blocking=True), wav.cuda(non_blocking=True)
            adversarial = step >= a.start_adv

            set_grad(d, False)
            og.zero_grad(set_to_none=True)
            with autocast():
                fake = g(mel)
                adv = hinge_g(d(fake)) if adversarial else 0.0
            loss_g = stft(fake.float(), wav) + 2.5 * adv
            sg.scale(loss_g).backward()
            sg.unscale_(og)
            torch.nn.utils.clip_grad_norm_(g.parameters(), 10.0)
            sg.step(og)
            sg.update()

            if adversarial:
                set_grad(d, True)
                od.zero_grad(set_to_none=True)
                with autocast():
                    loss_d = hinge_d(d(wav), d(fake.detach()))
                sd.scale(loss_d).backward()
                sd.unscale_(od)
                torch.nn.utils.clip_grad_norm_(d.parameters(), 1.0)
                sd.step(od)
                sd.update()

            step += 1
            if step % 10_000 == 0:
                save(f"{a.out}/{step}.pt", step, g=g, d=d, og=og, od=od, sg=sg, sd=sd)
            if step >= a.steps:
                return


if __name__ == "__main__":
    main()
