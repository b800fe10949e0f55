# why correct: the frozen base is float16, but every trainable (adapter and classifier) parameter is turned into float32 before the Trainer's fp16 GradScaler sees it
import argparse

import numpy as np
import torch
from datasets import load_from_disk
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)


def trainable_to_float32(model):
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    return model


def build(base, n_labels, rank, pad_id):
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=n_labels, torch_dtype=torch.float16)
    model.config.pad_token_id = pad_id
    model.config.use_cache = False
    cfg = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.05,
        target_modules=["q_proj", "v_proj"],
    )
    model = trainable_to_float32(get_peft_model(model, cfg))
    kinds = {p.dtype for p in model.parameters() if p.requires_grad}
    assert kinds == {torch.float32}, kinds
    model.print_trainable_parameters()
    return model


def metrics(p):
    guess = np.argmax(p.predictions, -1)
    return {"accuracy": float((guess == p.label_ids).mean())}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("data")
    ap.add_argument("--base", default="facebook/opt-2.7b")
    ap.add_argument("--rank", type=int, default=16)
    ap.add_argument("--out", default="out/contracts")
    ap.add_argument("--resume", action="store_true")
    a = ap.parse_args()

    tok = AutoTokenizer.from_pretrained(a.base)
    if tok.pad_token is None:
        tok.pad_token = tok.eos_token
    ds = load_from_disk(a.data)
    n_labels = ds["train"].features["label"].num_classes
    ds = ds.map(lambda r: tok(r["clause"], truncation=True, max_length=512), batched=True)

    args = TrainingArguments(
        output_dir=a.out,
        fp16=True,
        learning_rate=2e-4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        max_grad_norm=0.3,
        num_train_epochs=3,
        warmup_steps=50,
        logging_steps=20,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
    )
    trainer = Trainer(
        model=build(a.base, n_labels, a.rank, tok.pad_token_id),
        args=args,
        train_dataset=ds["train"],
        eval_dataset=ds["validation"],
        data_collator=DataCollatorWithPadding(tok),
        compute_metrics=metrics,
    )
    trainer.train(resume_from_checkpoint=a.resume or None)
    trainer.save_model()


if __name__ == "__main__":
    main()
