"""
# style of: lucidrains/denoising-diffusion-pytorch:denoising_diffusion_pytorch/denoising_diffusion_pytorch.py
# correct: accelerator.backward scales, the clip runs once per step after the whole window and unscales by itself; saving keeps the accelerator's scaler.
# torch: 1.13+ (accelerate)
"""
from pathlib import Path

import torch
from accelerate import Accelerator
from ema_pytorch import EMA
from torch.optim import Adam
from torch.utils.data import DataLoader
from tqdm.auto import tqdm


def exists(x):
    return x is not None


def cycle(dl):
    while True:
        for data in dl:
            yield data


class Trainer:
    def __init__(self, diffusion_model, dataset, *, batch_size=16, accumulate_every=2, lr=1e-4, num_steps=100000,
                 ema_decay=0.995, save_every=1000, results_folder="./results", amp=True, max_grad_norm=1.0):
        self.accelerator = Accelerator(mixed_precision="fp16" if amp else "no")
        self.accumulate_every = accumulate_every
        self.max_grad_norm = max_grad_norm
        self.num_steps, self.save_every = num_steps, save_every
        dl = DataLoader(dataset, batch_size=batch_size, shuffle=True, pin_memory=True)
        self.dl = cycle(self.accelerator.prepare(dl))
        self.opt = Adam(diffusion_model.parameters(), lr=lr, betas=(0.9, 0.99))
        if self.accelerator.is_main_process:
            self.ema = EMA(diffusion_model, beta=ema_decay, update_every=10).to(self.accelerator.device)
        self.results_folder = Path(results_folder)
        self.results_folder.mkdir(exist_ok=True)
        self.step = 0
        self.model, self.opt = self.accelerator.prepare(diffusion_model, self.opt)

    def save(self, milestone):
        if not self.accelerator.is_local_main_process:
            return
        data = {
            "step": self.step,
            "model": self.accelerator.get_state_dict(self.model),
            "opt": self.opt.state_dict(),
            "ema": self.ema.state_dict(),
            "scaler": self.accelerator.scaler.state_dict() if exists(self.accelerator.scaler) else None,
        }
        torch.save(data, str(self.results_folder / f"model-{milestone}.pt"))

    def load(self, milestone):
        data = torch.load(str(self.results_folder / f"model-{milestone}.pt"), map_location=self.accelerator.device)
        self.accelerator.unwrap_model(self.model).load_state_dict(data["model"])
        self.step = data["step"]
        self.opt.load_state_dict(data["opt"])
        if exists(self.accelerator.scaler) and exists(data["scaler"]):
            self.accelerator.scaler.load_state_dict(data["scaler"])

    def train(self):
        device = self.accelerator.device
        with tqdm(initial=self.step, total=self.num_steps, disable=not self.accelerator.is_main_process) as pbar:
            while self.step < self.num_steps:
                self.model.train()
                total_loss = 0.0
                for _ in range(self.accumulate_every):
                    data = next(self.dl).to(device)
                    with self.accelerator.autocast():
                        loss = self.model(data) / self.accumulate_every
                        total_loss += loss.item()
                    self.accelerator.backward(loss)
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
                self.opt.step()
                self.opt.zero_grad()
                self.step += 1
                if self.accelerator.is_main_process and not self.accelerator.optimizer_step_was_skipped:
                    self.ema.update()
                if self.step % self.save_every == 0:
                    self.save(self.step // self.save_every)
                pbar.set_description(f"loss: {total_loss:.4f}")
                pbar.update(1)
