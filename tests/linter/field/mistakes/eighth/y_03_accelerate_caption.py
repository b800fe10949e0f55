# source: https://github.com/harubaru/waifu-diffusion/issues/64
# mistake: with Accelerate's fp16 mode torch's own clip_grad_norm_ works on gradients that are still multiplied by the loss scale; accelerator.clip_grad_norm_ would unscale first.
# severity: error
import logging
import math
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, VisionEncoderDecoderModel, get_cosine_schedule_with_warmup

from captions import CaptionFolder, collate

log = logging.getLogger("caption")


@dataclass
class Settings:
    folder: str = "/data/coco_small"
    encoder: str = "google/vit-base-patch16-224-in21k"
    decoder: str = "gpt2"
    out: str = "ckpt"
    lr: float = 5e-5
    batch: int = 16
    epochs: int = 4
    warmup: int = 500
    clip: float = 1.0
    seed: int = 3


def build(s: Settings):
    tok = AutoTokenizer.from_pretrained(s.decoder)
    tok.pad_token = tok.eos_token
    net = VisionEncoderDecoderModel.from_encoder_decoder_pretrained(s.encoder, s.decoder)
    net.config.decoder_start_token_id = tok.bos_token_id
    net.config.pad_token_id = tok.pad_token_id
    return tok, net


def train(s: Settings):
    accelerator = Accelerator(mixed_precision="fp16", log_with="tensorboard", project_dir=s.out)
    set_seed(s.seed)
    accelerator.init_trackers("caption")
    tok, net = build(s)
    train_dl = DataLoader(CaptionFolder(s.folder, "train", tok), s.batch, shuffle=True, collate_fn=collate)
    val_dl = DataLoader(CaptionFolder(s.folder, "val", tok), s.batch, collate_fn=collate)

    decay = [p for n, p in net.named_parameters() if p.ndim > 1]
    plain = [p for n, p in net.named_parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01},
                                   {"params": plain, "weight_decay": 0.0}], lr=s.lr)
    total = s.epochs * len(train_dl)
    scheduler = get_cosine_schedule_with_warmup(optimizer, s.warmup, total)
    net, optimizer, train_dl, val_dl, scheduler = accelerator.prepare(net, optimizer, train_dl, val_dl, scheduler)

    step = 0
    for epoch in range(s.epochs):
        net.train()
        for batch in train_dl:
            loss = net(pixel_values=batch["pixels"], labels=batch["labels"]).loss
            accelerator.backward(loss)  # <- here
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), s.clip)  # <- here
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % 50 == 0:
                accelerator.log({"loss": loss.item(), "norm": norm.item()}, step=step)

        net.eval()
        losses = []
        for batch in val_dl:
            with torch.no_grad():
                out = net(pixel_values=batch["pixels"], labels=batch["labels"])
            losses.append(accelerator.gather_for_metrics(out.loss.repeat(len(batch["labels"]))))
        ppl = math.exp(torch.cat(losses).mean().item())
        if accelerator.is_main_process:
            log.info("epoch %d val ppl %.3f", epoch, ppl)
        accelerator.save_state(f"{s.out}/epoch_{epoch}")
    accelerator.end_training()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    train(Settings())
