# why correct: accelerator.clip_grad_norm_ unscales before clipping and is only called when sync_gradients is true; the prepared optimizer and scheduler skip what must be skipped
import argparse
import logging

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

logger = logging.getLogger(__name__)


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--mixed_precision", default="fp16", choices=["no", "fp16", "bf16"])
    p.add_argument("--gradient_accumulation_steps", type=int, default=4)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--steps", type=int, default=100_000)
    p.add_argument("--output_dir", default="ct-slices")
    p.add_argument("--resume", action="store_true")
    return p.parse_args()


def main(loader):
    args = parse()
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        project_config=ProjectConfiguration(project_dir=args.output_dir, automatic_checkpoint_naming=True, total_limit=3),
    )
    model = UNet2DModel(sample_size=256, in_channels=1, out_channels=1, block_out_channels=(64, 128, 256, 512),
                        down_block_types=("DownBlock2D",) * 3 + ("AttnDownBlock2D",),
                        up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * 3)
    ema = EMAModel(model.parameters(), decay=0.9999, use_ema_warmup=True)
    noise_scheduler = DDPMScheduler(beta_schedule="squaredcos_cap_v2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.95, 0.999), eps=1e-8)
    lr_scheduler = get_scheduler("cosine", optimizer, 500 * accelerator.num_processes,
                                 args.steps * accelerator.num_processes)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
    ema.to(accelerator.device)
    accelerator.register_for_checkpointing(ema)
    if args.resume:
        accelerator.load_state()

    done = 0
    model.train()
    while done < args.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                x = batch["slice"]
                eps = torch.randn_like(x)
                t = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(x),), device=x.device)
                pred = model(noise_scheduler.add_noise(x, eps, t), t).sample
                loss = F.mse_loss(pred.float(), eps.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            done += 1
            if not accelerator.optimizer_step_was_skipped:
                ema.step(model.parameters())
            if done % 5000 == 0:
                accelerator.save_state()
            if done >= args.steps:
                break
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        bare = accelerator.unwrap_model(model)
        ema.copy_to(bare.parameters())
        bare.save_pretrained(args.output_dir)
