# source: speechbrain/speechbrain issue #2881
# mistake: autocast is given the device with its index ("cuda:0") as device_type, which it refuses
# severity: error
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torchaudio
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from spotting.corpus import CommandSet


class Spotter(nn.Module):
    def __init__(self, words=35, width=128):
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(16000, n_fft=512, hop_length=160, n_mels=64)
        self.conv = nn.Sequential(
            nn.Conv1d(64, width, 9, padding=4), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, width, 9, padding=4, groups=width), nn.Conv1d(width, width, 1),
            nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, width, 9, padding=4, groups=width), nn.Conv1d(width, width, 1),
            nn.BatchNorm1d(width), nn.ReLU(),
        )
        self.out = nn.Linear(width, words)

    def forward(self, wave):
        with torch.autocast("cuda", enabled=False):
            spec = (self.mel(wave.float()) + 1e-5).log()
        return self.out(self.conv(spec).mean(-1))


class Brain:
    def __init__(self, model, precision="fp16"):
        self.rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", self.rank)  # <- here
        torch.cuda.set_device(self.device)
        self.model = DDP(model.to(self.device), device_ids=[self.rank])
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
        self.loss_fn = nn.CrossEntropyLoss()

    def context(self):
        return torch.autocast(device_type=str(self.device), dtype=self.dtype)  # <- here

    def fit_batch(self, wave, word):
        with self.context():
            loss = self.loss_fn(self.model(wave), word)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    @torch.no_grad()
    def accuracy(self, loader):
        self.model.eval()
        hits = torch.zeros(2, device=self.device)
        for wave, word in loader:
            wave, word = wave.to(self.device), word.to(self.device)
            with self.context():
                pred = self.model(wave).argmax(-1)
            hits += torch.stack([(pred == word).sum(), torch.tensor(len(word), device=self.device)])
        dist.all_reduce(hits)
        return (hits[0] / hits[1]).item()

    def fit(self, train, valid, epochs):
        for epoch in range(epochs):
            train.sampler.set_epoch(epoch)
            self.model.train()
            for wave, word in train:
                self.fit_batch(wave.to(self.device), word.to(self.device))
            acc = self.accuracy(valid)
            if self.rank == 0:
                print(f"epoch {epoch}: {acc:.4f}")


def main():
    dist.init_process_group("nccl")
    train, valid = CommandSet("training"), CommandSet("validation")
    brain = Brain(Spotter())
    brain.fit(
        DataLoader(train, 128, sampler=DistributedSampler(train), num_workers=4),
        DataLoader(valid, 256, sampler=DistributedSampler(valid, shuffle=False), num_workers=4),
        epochs=30,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
