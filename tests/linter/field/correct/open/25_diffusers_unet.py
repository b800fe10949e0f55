# style of: huggingface/diffusers:examples/text_to_image/train_text_to_image.py
# torch: 2.0+
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from transformers import CLIPTextModel


def main(args, train_dataloader):
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
    )
    noise_scheduler = DDPMScheduler.from_pretrained(args.base, subfolder="scheduler")
    text_encoder = CLIPTextModel.from_pretrained(args.base, subfolder="text_encoder")
    vae = AutoencoderKL.from_pretrained(args.base, subfolder="vae")
    unet = UNet2DConditionModel.from_pretrained(args.base, subfolder="unet")
    vae.requires_grad_(False)
    text_encoder.requires_grad_(False)
    unet.train()
    ema_unet = EMAModel(unet.parameters(), model_cls=UNet2DConditionModel, model_config=unet.config)

    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.learning_rate, eps=1e-8)
    lr_scheduler = get_scheduler(
        "constant_with_warmup", optimizer=optimizer, num_warmup_steps=500 * accelerator.num_processes
    )
    unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        unet, optimizer, train_dataloader, lr_scheduler
    )

    # frozen networks are only used for inference: half weights are enough.
    # The trained unet keeps float32 weights.
    weight_dtype = torch.float32
    if accelerator.mixed_precision == "fp16":
        weight_dtype = torch.float16
    elif accelerator.mixed_precision == "bf16":
        weight_dtype = torch.bfloat16
    text_encoder.to(accelerator.device, dtype=weight_dtype)
    vae.to(accelerator.device, dtype=weight_dtype)
    ema_unet.to(accelerator.device)
    accelerator.register_for_checkpointing(ema_unet)

    global_step = 0
    for epoch in range(args.num_train_epochs):
        for batch in train_dataloader:
            with accelerator.accumulate(unet):
                latents = vae.encode(batch["pixel_values"].to(weight_dtype)).latent_dist.sample()
                latents = latents * vae.config.scaling_factor
                noise = torch.randn_like(latents)
                timesteps = torch.randint(
                    0, noise_scheduler.config.num_train_timesteps, (latents.shape[0],), device=latents.device
                )
                noisy = noise_scheduler.add_noise(latents, noise, timesteps)
                hidden = text_encoder(batch["input_ids"], return_dict=False)[0]
                pred = unet(noisy, timesteps, hidden, return_dict=False)[0]
                loss = F.mse_loss(pred.float(), noise.float(), reduction="mean")

                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

            if accelerator.sync_gradients:
                ema_unet.step(unet.parameters())
                global_step += 1
                if global_step % args.checkpointing_steps == 0:
                    accelerator.save_state(f"{args.output_dir}/checkpoint-{global_step}")
    accelerator.end_training()
