"""
# style of: ashawkey/stable-dreamfusion:guidance/sd_utils.py
# correct: the custom function is decorated with custom_fwd and custom_bwd and multiplies the given gradient by the incoming one, so the loss scale passes through it.
# torch: 1.13+
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Function
from torch.cuda.amp import custom_bwd, custom_fwd

from renderer import NeRFRenderer, orbit_cameras


class SpecifyGradient(Function):
    @staticmethod
    @custom_fwd
    def forward(ctx, input_tensor, gt_grad):
        ctx.save_for_backward(gt_grad)
        # a dummy value; what matters is the gradient
        return torch.ones([1], device=input_tensor.device, dtype=input_tensor.dtype)

    @staticmethod
    @custom_bwd
    def backward(ctx, grad_scale):
        (gt_grad,) = ctx.saved_tensors
        return gt_grad * grad_scale, None


class StableDiffusion(nn.Module):
    def __init__(self, unet, vae, scheduler, device, fp16=True):
        super().__init__()
        self.dtype = torch.float16 if fp16 else torch.float32
        # frozen, only used for inference: half weights are fine
        self.unet = unet.to(device, self.dtype).requires_grad_(False)
        self.vae = vae.to(device).requires_grad_(False)
        self.scheduler = scheduler
        self.alphas = scheduler.alphas_cumprod.to(device)

    def train_step(self, embeddings, pred_rgb, guidance_scale=100.0):
        latents = self.vae.encode(2 * F.interpolate(pred_rgb, (512, 512)) - 1).latent_dist.sample() * 0.18215
        t = torch.randint(20, 980, [1], dtype=torch.long, device=latents.device)
        with torch.no_grad():
            noise = torch.randn_like(latents)
            noisy = self.scheduler.add_noise(latents, noise, t)
            out = self.unet(torch.cat([noisy] * 2).to(self.dtype), t, encoder_hidden_states=embeddings).sample
            uncond, cond = out.float().chunk(2)
            pred = uncond + guidance_scale * (cond - uncond)
        grad = torch.nan_to_num((1 - self.alphas[t]) * (pred - noise))
        return SpecifyGradient.apply(latents, grad)


class Trainer:
    def __init__(self, opt, model, guidance, embeddings):
        self.opt, self.model, self.guidance, self.embeddings = opt, model.cuda(), guidance, embeddings
        self.renderer = NeRFRenderer(model)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=opt.lr, betas=(0.9, 0.99), eps=1e-15)
        self.scaler = torch.cuda.amp.GradScaler(enabled=opt.fp16)

    def train(self, iters):
        self.model.train()
        for step, rays in zip(range(iters), orbit_cameras(self.opt)):
            self.optimizer.zero_grad()
            with torch.cuda.amp.autocast(enabled=self.opt.fp16):
                out = self.renderer(rays)
                loss = self.guidance.train_step(self.embeddings, out["image"])
                loss = loss + self.opt.lambda_opacity * (out["weights_sum"].float() ** 2).mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if step % 100 == 0:
                print(step, self.scaler.get_scale())
