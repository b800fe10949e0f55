"""
# source: https://github.com/TorchSSL/TorchSSL/pull/59
# mistake: with AMP the semi-supervised trainer clips the scaled gradients; unscale_ is never called before clip_grad_norm_.
# severity: error
# torch: any
"""
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch.cuda.amp import GradScaler


def consistency_loss(logits_w, logits_s, threshold=0.95, temperature=0.5):
    with torch.no_grad():
        probs = torch.softmax(logits_w.float() / temperature, dim=-1)
        conf, pseudo = probs.max(dim=-1)
        mask = conf.ge(threshold).float()
    return (F.cross_entropy(logits_s, pseudo, reduction="none") * mask).mean(), mask.mean()


class FixMatch:
    def __init__(self, net, num_classes, lambda_u):
        self.model = net.cuda()
        self.num_classes = num_classes
        self.lambda_u = lambda_u
        self.it = 0

    def set_optimizer(self, optimizer, scheduler):
        self.optimizer, self.scheduler = optimizer, scheduler

    def train(self, args, lb_loader, ulb_loader):
        self.model.train()
        scaler = GradScaler()
        amp_cm = partial(torch.cuda.amp.autocast, dtype=torch.float16) if args.amp else nullcontext

        for (x_lb, y_lb), (x_w, x_s) in zip(lb_loader, ulb_loader):
            num_lb = x_lb.shape[0]
            inputs = torch.cat((x_lb, x_w, x_s)).cuda()
            y_lb = y_lb.cuda()

            with amp_cm():
                logits = self.model(inputs)
                logits_lb = logits[:num_lb]
                logits_w, logits_s = logits[num_lb:].chunk(2)
                sup_loss = F.cross_entropy(logits_lb, y_lb)
                unsup_loss, mask = consistency_loss(logits_w.detach(), logits_s)
                total_loss = sup_loss + self.lambda_u * unsup_loss

            if args.amp:
                scaler.scale(total_loss).backward()
                if args.clip > 0:
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), args.clip)  # <- here
                scaler.step(self.optimizer)
                scaler.update()
            else:
                total_loss.backward()
                if args.clip > 0:
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), args.clip)
                self.optimizer.step()

            self.scheduler.step()
            self.model.zero_grad()
            self.it += 1
            if self.it % 256 == 0:
                print(f"{self.it}: sup {sup_loss.item():.3f} unsup {unsup_loss.item():.3f} mask {mask.item():.2f}")
