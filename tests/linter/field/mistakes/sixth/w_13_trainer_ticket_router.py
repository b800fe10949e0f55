# source: haotian-liu/LLaVA issue #363 (same: ShivamShrirao/diffusers issue #131)
# mistake: the model to be fully fine-tuned is loaded in float16 and then trained with fp16=True; the GradScaler of the Trainer raises "Attempting to unscale FP16 gradients"
# severity: error
import argparse

import numpy as np
import torch
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
)


def load_backbone(name, labels):
    kwargs = dict(num_labels=len(labels), id2label=dict(enumerate(labels)))
    kwargs["torch_dtype"] = torch.float16  # <- here
    model = AutoModelForSequenceClassification.from_pretrained(name, **kwargs)  # <- here
    model.config.label2id = {l: i for i, l in enumerate(labels)}
    return model


def macro_f1(pred):
    guess = pred.predictions.argmax(-1)
    truth = pred.label_ids
    scores = []
    for c in np.unique(truth):
        tp = np.sum((guess == c) & (truth == c))
        fp = np.sum((guess == c) & (truth != c))
        fn = np.sum((guess != c) & (truth == c))
        scores.append(2 * tp / max(2 * tp + fp + fn, 1))
    return {"macro_f1": float(np.mean(scores)), "accuracy": float(np.mean(guess == truth))}


def parse():
    p = argparse.ArgumentParser("route support tickets to teams")
    p.add_argument("--csv", required=True)
    p.add_argument("--backbone", default="microsoft/deberta-v3-base")
    p.add_argument("--lr", type=float, default=2e-5)
    p.add_argument("--epochs", type=float, default=4)
    p.add_argument("--out", default="ticket-router")
    return p.parse_args()


def main():
    a = parse()
    raw = load_dataset("csv", data_files=a.csv)["train"].class_encode_column("team")
    labels = raw.features["team"].names
    split = raw.train_test_split(0.1, seed=3, stratify_by_column="team")

    tok = AutoTokenizer.from_pretrained(a.backbone)

    def encode(rows):
        enc = tok(rows["subject"], rows["body"], truncation=True, max_length=384)
        enc["labels"] = rows["team"]
        return enc

    split = split.map(encode, batched=True, remove_columns=raw.column_names)

    targs = TrainingArguments(
        output_dir=a.out,
        learning_rate=a.lr,
        num_train_epochs=a.epochs,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        warmup_ratio=0.06,
        weight_decay=0.01,
        max_grad_norm=1.0,
        fp16=True,  # <- here
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="macro_f1",
        report_to="none",
    )
    trainer = Trainer(
        model=load_backbone(a.backbone, labels),
        args=targs,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        data_collator=DataCollatorWithPadding(tok, pad_to_multiple_of=8),
        compute_metrics=macro_f1,
        callbacks=[EarlyStoppingCallback(2)],
    )
    trainer.train()  # <- here
    trainer.save_model(a.out + "/best")


if __name__ == "__main__":
    main()
