"""
# source: https://github.com/victorchall/EveryDream2trainer/pull/175
# mistake: the optimizer wrapper clips to clip_grad_norm while the gradients still carry the loss scale, so with AMP every step is shrunk by the current scale.
# severity: error
# torch: any
"""
import itertools

import torch
from torch.amp import GradScaler


class TwoPartOptimizer:
    """Owns the optimizers of the unet and of the text encoder, and one scaler for the two."""

    def __init__(self, args, unet, text_encoder):
        self.args = args
        self.unet_params = list(unet.parameters())
        self.te_params = list(text_encoder.parameters())
        self.optimizers = [
            torch.optim.AdamW(self.unet_params, lr=args.lr, weight_decay=1e-2),
            torch.optim.AdamW(self.te_params, lr=args.lr * 0.3, weight_decay=1e-2),
        ]
        self.scaler = GradScaler("cuda", enabled=not args.disable_amp, init_scale=2**17, growth_interval=25)
        self.clip_grad_norm = args.clip_grad_norm

    def step(self, loss, micro_step: int):
        self.scaler.scale(loss / self.args.grad_accum).backward()
        if (micro_step + 1) % self.args.grad_accum == 0:
            self._optimizer_step()

    def _optimizer_step(self):
        if self.clip_grad_norm is not None:
            self._clip()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _clip(self):
        torch.nn.utils.clip_grad_norm_(self.unet_params, max_norm=self.clip_grad_norm)  # <- here
        torch.nn.utils.clip_grad_norm_(self.te_params, max_norm=self.clip_grad_norm)  # <- here

    def get_scale(self):
        return self.scaler.get_scale()


def train(args, unet, text_encoder, noise_scheduler, dataloader, log):
    ed_optimizer = TwoPartOptimizer(args, unet, text_encoder)
    for epoch in range(args.max_epochs):
        for step, batch in enumerate(itertools.islice(dataloader, args.steps_per_epoch)):
            with torch.autocast("cuda", dtype=torch.float16, enabled=not args.disable_amp):
                cond = text_encoder(batch["tokens"].cuda())[0]
                noise = torch.randn_like(batch["latents"])
                t = torch.randint(0, 1000, (noise.shape[0],), device="cuda")
                noisy = noise_scheduler.add_noise(batch["latents"], noise, t)
                pred = unet(noisy, t, cond).sample
            loss = torch.nn.functional.mse_loss(pred.float(), noise.float())
            ed_optimizer.step(loss, step)
            log.add_scalar("loss", loss.item(), step)
            log.add_scalar("scale", ed_optimizer.get_scale(), step)
