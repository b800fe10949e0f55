# source: huggingface/accelerate issue #1773 (duplicate of #1767); see also huggingface/accelerate issue #3533
# mistake: the loss is divided by the accumulation steps by hand although accelerator.backward already divides it, so gradients are accumulation-steps times too small
# severity: error
import os
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from datasets import Audio, load_dataset
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import WhisperForConditionalGeneration, WhisperProcessor, get_scheduler

cfg = SimpleNamespace(
    base="openai/whisper-small",
    dataset="mozilla-foundation/common_voice_13_0",
    lang="cy",
    lr=5e-5,
    epochs=5,
    per_device=8,
    accumulation=4,
    clip=1.0,
    out="whisper-cy",
)

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=cfg.accumulation)  # <- here
processor = WhisperProcessor.from_pretrained(cfg.base, language="welsh", task="transcribe")


def prepare(row):
    audio = row["audio"]
    feats = processor.feature_extractor(audio["array"], sampling_rate=audio["sampling_rate"])
    return {"input_features": feats.input_features[0], "labels": processor.tokenizer(row["sentence"]).input_ids}


def collate(rows):
    x = torch.tensor([r["input_features"] for r in rows], dtype=torch.float32)
    y = processor.tokenizer.pad({"input_ids": [r["labels"] for r in rows]}, return_tensors="pt")
    labels = y.input_ids.masked_fill(y.attention_mask.ne(1), -100)
    if (labels[:, 0] == processor.tokenizer.bos_token_id).all():
        labels = labels[:, 1:]
    return {"input_features": x, "labels": labels}


with accelerator.main_process_first():
    train = load_dataset(cfg.dataset, cfg.lang, split="train").cast_column("audio", Audio(sampling_rate=16_000))
    train = train.map(prepare, remove_columns=train.column_names)

model = WhisperForConditionalGeneration.from_pretrained(cfg.base)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=cfg.lr)
loader = DataLoader(train, batch_size=cfg.per_device, shuffle=True, collate_fn=collate)
lr_sched = get_scheduler(
    "linear", optimizer, num_warmup_steps=200, num_training_steps=cfg.epochs * len(loader) // cfg.accumulation
)
model, optimizer, loader, lr_sched = accelerator.prepare(model, optimizer, loader, lr_sched)

for epoch in range(cfg.epochs):
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            out = model(input_features=batch["input_features"], labels=batch["labels"])
            loss = out.loss / cfg.accumulation  # <- here
            accelerator.backward(loss)  # <- here
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), cfg.clip)
            optimizer.step()
            lr_sched.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: {out.loss.item():.4f}")
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        os.path.join(cfg.out, str(epoch)), is_main_process=accelerator.is_main_process
    )
