# source: harubaru/waifu-diffusion issue #64
# mistake: with Accelerate in fp16 the gradients are clipped with torch's own function while they are still multiplied by the loss scale
# severity: error
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    VisionEncoderDecoderModel,
    get_cosine_schedule_with_warmup,
)


@dataclass
class Settings:
    encoder: str = "google/vit-base-patch16-224-in21k"
    decoder: str = "gpt2"
    lr: float = 5e-5
    weight_decay: float = 0.05
    epochs: int = 4
    per_device_batch: int = 12
    warmup: int = 400
    max_norm: float = 1.0
    out: str = "runs/caption"


def shift_labels(ids, pad_id):
    return ids.masked_fill(ids == pad_id, -100)


def build_collate(processor, tokenizer):
    def collate(rows):
        pixels = processor([r["image"] for r in rows], return_tensors="pt").pixel_values
        text = tokenizer([r["caption"] for r in rows], padding=True, truncation=True,
                         max_length=48, return_tensors="pt")
        return {"pixel_values": pixels, "labels": shift_labels(text.input_ids, tokenizer.pad_token_id)}

    return collate


def fit(cfg: Settings, train_rows, val_rows):
    set_seed(11)
    acc = Accelerator(mixed_precision="fp16", log_with="tensorboard", project_dir=cfg.out)

    tok = AutoTokenizer.from_pretrained(cfg.decoder)
    tok.pad_token = tok.eos_token
    proc = AutoImageProcessor.from_pretrained(cfg.encoder)
    net = VisionEncoderDecoderModel.from_encoder_decoder_pretrained(cfg.encoder, cfg.decoder)
    net.config.decoder_start_token_id = tok.bos_token_id
    net.config.pad_token_id = tok.pad_token_id

    collate = build_collate(proc, tok)
    train_dl = DataLoader(train_rows, cfg.per_device_batch, shuffle=True, collate_fn=collate)
    val_dl = DataLoader(val_rows, cfg.per_device_batch, collate_fn=collate)

    opt = torch.optim.AdamW(net.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
    total = cfg.epochs * len(train_dl)
    sched = get_cosine_schedule_with_warmup(opt, cfg.warmup, total)
    net, opt, train_dl, val_dl, sched = acc.prepare(net, opt, train_dl, val_dl, sched)
    acc.init_trackers("caption")

    step = 0
    for epoch in range(cfg.epochs):
        net.train()
        for batch in train_dl:
            out = net(**batch)
            acc.backward(out.loss)
            clip_grad_norm_(net.parameters(), cfg.max_norm)  # <- here
            opt.step()
            sched.step()
            opt.zero_grad()
            step += 1
            if step % 50 == 0:
                acc.log({"loss": out.loss.item(), "lr": sched.get_last_lr()[0]}, step=step)

        net.eval()
        nll, n = 0.0, 0
        for batch in val_dl:
            with torch.no_grad():
                logits = net(**batch).logits
            losses = F.cross_entropy(logits.float().transpose(1, 2), batch["labels"], reduction="none")
            losses = losses.sum(-1)
            losses = acc.gather_for_metrics(losses)
            nll += losses.sum().item()
            n += losses.numel()
        acc.print(f"epoch {epoch}: val nll/caption {nll / max(n, 1):.3f}")
        acc.save_state(os.path.join(cfg.out, f"epoch_{epoch}"))

    acc.end_training()
    return acc.unwrap_model(net)
