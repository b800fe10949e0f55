# why correct: the epoch function takes its scaler from a state object that is created once, so nothing is rebuilt per epoch
from dataclasses import dataclass, field

import torch
import torchaudio
from torch import nn


@dataclass
class State:
    model: nn.Module
    half: bool = True
    lr: float = 1e-3
    optimizer: torch.optim.Optimizer = field(init=False)
    scaler: torch.amp.GradScaler = field(init=False)
    epoch: int = 0

    def __post_init__(self):
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.lr)
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.half)

    def pack(self):
        return dict(
            model=self.model.state_dict(), optimizer=self.optimizer.state_dict(),
            scaler=self.scaler.state_dict(), epoch=self.epoch,
        )

    def unpack(self, d):
        self.model.load_state_dict(d["model"])
        self.optimizer.load_state_dict(d["optimizer"])
        self.scaler.load_state_dict(d["scaler"])
        self.epoch = d["epoch"]


class BirdCNN(nn.Module):
    def __init__(self, species=200):
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(32000, n_fft=1024, hop_length=320, n_mels=128)
        self.db = torchaudio.transforms.AmplitudeToDB(top_db=80)
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 96, 3, 2, 1), nn.BatchNorm2d(96), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, species),
        )

    def forward(self, wav):
        with torch.autocast("cuda", enabled=False):
            spec = self.db(self.mel(wav.float())).unsqueeze(1) / 40.0
        return self.net(spec)


def one_epoch(state, loader):
    scaler = state.scaler
    optimizer = state.optimizer
    state.model.train()
    for wav, tags in loader:
        wav, tags = wav.cuda(), tags.cuda()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=state.half):
            logits = state.model(wav)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, tags)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    state.epoch += 1
    return loss.item()


if __name__ == "__main__":
    from birds import loader

    st = State(BirdCNN().cuda())
    data = loader(batch=64)
    while st.epoch < 50:
        print(st.epoch, one_epoch(st, data))
        torch.save(st.pack(), "birds.pt")
