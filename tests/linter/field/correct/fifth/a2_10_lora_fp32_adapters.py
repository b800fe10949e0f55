# why correct: only the frozen networks are float16; every parameter that is trained is cast back to float32 before the optimizer and the scaler see it
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict


HALF = torch.float16


def freeze_half(module, device):
    module.requires_grad_(False)
    return module.to(device, dtype=HALF).eval()


def trainables(module):
    chosen = []
    for p in module.parameters():
        if p.requires_grad:
            p.data = p.data.to(torch.float32)
            chosen.append(p)
    return chosen


class LoraTrainer:
    def __init__(self, repo, rank=16, lr=1e-4, device="cuda"):
        self.device = device
        self.noise = DDPMScheduler.from_pretrained(repo, subfolder="scheduler")
        self.vae = freeze_half(AutoencoderKL.from_pretrained(repo, subfolder="vae"), device)
        self.unet = freeze_half(UNet2DConditionModel.from_pretrained(repo, subfolder="unet"), device)
        self.unet.add_adapter(LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian",
                                         target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
        self.unet.to(device).train()
        self.params = trainables(self.unet)
        self.opt = torch.optim.AdamW(self.params, lr=lr)
        self.scaler = torch.amp.GradScaler("cuda")

    @torch.no_grad()
    def latents(self, pixels):
        post = self.vae.encode(pixels.to(self.device, HALF)).latent_dist
        return post.sample() * self.vae.config.scaling_factor

    def step(self, batch):
        z = self.latents(batch["pixels"])
        eps = torch.randn_like(z)
        t = torch.randint(0, self.noise.config.num_train_timesteps, (z.shape[0],), device=self.device)
        noisy = self.noise.add_noise(z, eps, t)
        with torch.autocast("cuda", dtype=HALF):
            pred = self.unet(noisy, t, batch["context"].to(self.device, HALF)).sample
        loss = F.mse_loss(pred.float(), eps.float())
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad(set_to_none=True)
        return loss.item()

    def export(self, path):
        weights = {k: v.half() for k, v in get_peft_model_state_dict(self.unet).items()}
        torch.save(weights, path)


def run(repo, loader, steps=2000):
    tr = LoraTrainer(repo)
    it = 0
    while it < steps:
        for batch in loader:
            loss = tr.step(batch)
            it += 1
            if it % 100 == 0:
                print(it, loss)
            if it == steps:
                break
    tr.export("adapter_fp16.pt")
