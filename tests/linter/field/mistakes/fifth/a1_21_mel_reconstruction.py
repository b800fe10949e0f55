# source: jaywalnut310/vits issue #15 (NaN with fp16 until the mel transform is taken out of autocast); NVIDIA-NeMo/Speech PR #12542
# mistake: under float16 autocast the mel projection yields half precision, in which the floor 1e-9 of the clamp is zero, so silent frames give log(0) = -inf and a non-finite loss
# severity: error
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchaudio


class LogMel(nn.Module):
    def __init__(self, rate=22_050, n_fft=1024, hop=256, mels=80):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)
        bank = torchaudio.functional.melscale_fbanks(n_fft // 2 + 1, 0.0, 8000.0, mels, rate, norm="slaney")
        self.register_buffer("bank", bank.t().contiguous(), persistent=False)

    def forward(self, wav):
        spec = torch.stft(wav.float(), self.n_fft, self.hop, window=self.window, return_complex=True).abs()
        mel = torch.matmul(self.bank, spec)  # <- here
        return torch.log(torch.clamp(mel, min=1e-9))  # <- here


class Codec(nn.Module):
    def __init__(self, width=64, code=128):
        super().__init__()
        down, up, c = [nn.Conv1d(1, width, 7, padding=3)], [], width
        for s in (2, 4, 4, 8):
            down += [nn.ELU(), nn.Conv1d(c, 2 * c, 2 * s, stride=s, padding=s // 2)]
            c *= 2
        down += [nn.ELU(), nn.Conv1d(c, code, 3, padding=1)]
        up += [nn.Conv1d(code, c, 7, padding=3)]
        for s in (8, 4, 4, 2):
            up += [nn.ELU(), nn.ConvTranspose1d(c, c // 2, 2 * s, stride=s, padding=s // 2)]
            c //= 2
        up += [nn.ELU(), nn.Conv1d(c, 1, 7, padding=3), nn.Tanh()]
        self.down, self.up = nn.Sequential(*down), nn.Sequential(*up)

    def forward(self, wav):
        return self.up(self.down(wav.unsqueeze(1))).squeeze(1)


class Experiment:
    def __init__(self, loader, device="cuda", half=True):
        self.loader, self.device, self.half = loader, device, half
        self.codec = Codec().to(device)
        self.mel = LogMel().to(device)
        self.opt = torch.optim.AdamW(self.codec.parameters(), lr=2e-4, betas=(0.8, 0.99))
        self.scaler = torch.amp.GradScaler("cuda", enabled=half)
        self.n = 0

    def criterion(self, guess, wav):
        size = min(guess.size(-1), wav.size(-1))
        guess, wav = guess[..., :size], wav[..., :size]
        return 15.0 * F.l1_loss(self.mel(guess), self.mel(wav)) + F.l1_loss(guess, wav)

    def train_batch(self, wav):
        wav = wav.to(self.device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.half):  # <- here
            guess = self.codec(wav)
            loss = self.criterion(guess, wav)
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        norm = nn.utils.clip_grad_norm_(self.codec.parameters(), 10.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.n += 1
        if self.n % 250 == 0:
            print(f"{self.n}: loss {loss.item():.3f} norm {norm.item():.2f} scale {self.scaler.get_scale():g}")

    def run(self, epochs=100):
        for epoch in range(epochs):
            for wav in self.loader:
                self.train_batch(wav)
            torch.save(
                {"codec": self.codec.state_dict(), "opt": self.opt.state_dict(), "scaler": self.scaler.state_dict()},
                f"codec_{epoch:03d}.pt",
            )
