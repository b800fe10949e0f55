# source: IAHispano/Applio PR #860 https://github.com/IAHispano/Applio/pull/860
# mistake: after scaler.step the plain optimizer step is called too, so each network moves twice per batch and even when infs were found
# severity: error
import torch
import torch.nn as nn
import torch.nn.functional as F


class Wave(nn.Module):
    def __init__(self, mels=80, hop=256):
        super().__init__()
        self.pre = nn.Conv1d(mels, 256, 7, padding=3)
        self.up = nn.ConvTranspose1d(256, 64, hop * 2, hop, hop // 2)
        self.post = nn.Conv1d(64, 1, 7, padding=3)

    def forward(self, mel):
        return torch.tanh(self.post(F.leaky_relu(self.up(F.leaky_relu(self.pre(mel), 0.1)), 0.1)))


class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 32, 15, 4, 7), nn.LeakyReLU(0.1),
            nn.Conv1d(32, 128, 41, 4, 20, groups=4), nn.LeakyReLU(0.1),
            nn.Conv1d(128, 1, 3, padding=1),
        )

    def forward(self, wav):
        return self.net(wav)


class VoiceTrainer:
    def __init__(self, lr=2e-4):
        self.gen, self.dis = Wave().cuda(), Judge().cuda()
        self.opt_g = torch.optim.AdamW(self.gen.parameters(), lr, betas=(0.8, 0.99))
        self.opt_d = torch.optim.AdamW(self.dis.parameters(), lr, betas=(0.8, 0.99))
        self.scaler = torch.amp.GradScaler("cuda")

    def discriminator_turn(self, wav, fake):
        with torch.autocast("cuda", dtype=torch.float16):
            real_s, fake_s = self.dis(wav), self.dis(fake.detach())
        loss = (1 - real_s.float()).square().mean() + fake_s.float().square().mean()
        self.opt_d.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt_d)
        nn.utils.clip_grad_norm_(self.dis.parameters(), 1000.0)
        self.scaler.step(self.opt_d)  # <- here
        return loss

    def generator_turn(self, wav, fake):
        with torch.autocast("cuda", dtype=torch.float16):
            score = self.dis(fake)
        loss = (1 - score.float()).square().mean() + 45 * F.l1_loss(fake.float(), wav)
        self.opt_g.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt_g)
        nn.utils.clip_grad_norm_(self.gen.parameters(), 1000.0)
        self.scaler.step(self.opt_g)  # <- here
        self.scaler.update()
        return loss

    def batch(self, mel, wav):
        with torch.autocast("cuda", dtype=torch.float16):
            fake = self.gen(mel)
        d = self.discriminator_turn(wav, fake)
        g = self.generator_turn(wav, fake)
        self.opt_g.step()  # <- here
        self.opt_d.step()  # <- here
        return d.item(), g.item()


def main():
    from corpus import mel_wave_pairs

    trainer = VoiceTrainer()
    for n, (mel, wav) in enumerate(mel_wave_pairs()):
        d, g = trainer.batch(mel.cuda(), wav.cuda())
        if n % 200 == 0:
            print(f"{n} d={d:.3f} g={g:.3f}")


main()
