"""
# style of: Megvii-BaseDetection/YOLOX:yolox/core/trainer.py
# correct: a disabled scaler makes the same lines work in float32; only the images are cast to data_type, as the autocast input; the learning rate is computed from the iteration.
# torch: 1.7+
"""
import os
import time

import torch
from loguru import logger


class Trainer:
    def __init__(self, exp, args):
        self.exp = exp
        self.args = args
        self.max_epoch = exp.max_epoch
        self.amp_training = args.fp16
        self.scaler = torch.cuda.amp.GradScaler(enabled=args.fp16)
        self.data_type = torch.float16 if args.fp16 else torch.float32
        self.device = f"cuda:{args.local_rank}"
        self.file_name = os.path.join(exp.output_dir, args.experiment_name)

    def train(self):
        self.before_train()
        for self.epoch in range(self.start_epoch, self.max_epoch):
            for self.iter in range(self.max_iter):
                self.train_one_iter()
            self.save_ckpt("latest")

    def before_train(self):
        self.model = self.exp.get_model().to(self.device)
        self.optimizer = self.exp.get_optimizer(self.args.batch_size)
        self.resume_train()
        self.loader = self.exp.get_data_loader(self.args.batch_size)
        self.max_iter = len(self.loader)
        self.prefetcher = iter(self.loader)
        self.lr_scheduler = self.exp.get_lr_scheduler(self.max_iter)
        self.ema_model = self.exp.get_ema(self.model, 0.9998)

    def train_one_iter(self):
        start = time.time()
        inps, targets = next(self.prefetcher)
        inps = inps.to(self.device, self.data_type)
        targets = targets.to(self.device).float()
        targets.requires_grad = False
        inps, targets = self.exp.preprocess(inps, targets)

        with torch.cuda.amp.autocast(enabled=self.amp_training):
            outputs = self.model(inps, targets)
        loss = outputs["total_loss"]

        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()

        if self.exp.ema and self.scaler.get_scale() >= scale:
            self.ema_model.update(self.model)

        lr = self.lr_scheduler.update_lr(self.epoch * self.max_iter + self.iter + 1)
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = lr
        if (self.iter + 1) % self.exp.print_interval == 0:
            logger.info(f"{self.epoch}/{self.iter}: loss {loss.item():.3f}, {time.time() - start:.3f}s, lr {lr:.2e}")

    def resume_train(self):
        self.start_epoch = 0
        if self.args.resume:
            ckpt = torch.load(os.path.join(self.file_name, "latest_ckpt.pth"), map_location=self.device)
            self.model.load_state_dict(ckpt["model"])
            self.optimizer.load_state_dict(ckpt["optimizer"])
            self.scaler.load_state_dict(ckpt["scaler"])
            self.start_epoch = ckpt["start_epoch"]

    def save_ckpt(self, name):
        state = {
            "start_epoch": self.epoch + 1,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        torch.save(state, os.path.join(self.file_name, f"{name}_ckpt.pth"))
