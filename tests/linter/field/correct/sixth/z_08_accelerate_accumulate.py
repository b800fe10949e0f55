# why correct: clipping runs only when gradients are synchronised and through accelerator.clip_grad_norm_; step/zero_grad are unconditional since the wrapped optimizer ignores them while accumulating
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from torchvision import transforms
from tqdm.auto import tqdm


def build_loader(folder, size, batch):
    from torchvision.datasets import ImageFolder

    tf = transforms.Compose([transforms.Resize(size), transforms.CenterCrop(size), transforms.RandomHorizontalFlip(),
                             transforms.ToTensor(), transforms.Normalize([0.5], [0.5])])
    return torch.utils.data.DataLoader(ImageFolder(folder, tf), batch_size=batch, shuffle=True, num_workers=8)


def run(folder, out="ddpm-out", size=64, batch=16, epochs=100, accumulate=4, lr=1e-4, resume=None):
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=accumulate,
                              project_config=ProjectConfiguration(project_dir=out, automatic_checkpoint_naming=True))
    model = UNet2DModel(sample_size=size, in_channels=3, out_channels=3, layers_per_block=2,
                        block_out_channels=(128, 256, 256, 512))
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    loader = build_loader(folder, size, batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.95, 0.999), weight_decay=1e-6)
    lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=500 * accelerator.num_processes,
                                 num_training_steps=len(loader) * epochs // accumulate)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
    if resume:
        accelerator.load_state(resume)

    for epoch in range(epochs):
        model.train()
        bar = tqdm(loader, disable=not accelerator.is_local_main_process, desc=f"epoch {epoch}")
        for clean, _ in bar:
            noise = torch.randn_like(clean)
            t = torch.randint(0, 1000, (clean.shape[0],), device=clean.device)
            noisy = noise_scheduler.add_noise(clean, noise, t)
            with accelerator.accumulate(model):
                pred = model(noisy, t).sample
                loss = F.mse_loss(pred.float(), noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            bar.set_postfix(loss=loss.detach().item(), lr=lr_scheduler.get_last_lr()[0])
        if (epoch + 1) % 10 == 0:
            accelerator.save_state()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(Path(out) / "unet")
    accelerator.end_training()


if __name__ == "__main__":
    run(os.environ["IMAGES"])
