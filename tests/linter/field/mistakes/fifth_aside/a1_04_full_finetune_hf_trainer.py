# source: yk7333/d3po issue #6 ("Attempting to unscale FP16 gradients", full fine-tuning without LoRA); huggingface/diffusers issue #6442
# mistake: the weights that are trained are loaded in float16 and the Trainer is also given fp16=True, so its GradScaler raises "Attempting to unscale FP16 gradients"
# severity: error
from dataclasses import dataclass, field

import numpy as np
import torch
from datasets import load_dataset
from sklearn.metrics import f1_score
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class TicketArgs:
    backbone: str = "microsoft/deberta-v3-large"
    train_file: str = "tickets_train.csv"
    dev_file: str = "tickets_dev.csv"
    labels: list[str] = field(default_factory=lambda: ["billing", "outage", "howto", "other"])
    save_to: str = "ticket_router"


def build_model(cfg: TicketArgs):
    return AutoModelForSequenceClassification.from_pretrained(
        cfg.backbone,
        num_labels=len(cfg.labels),
        torch_dtype=torch.float16,  # <- here
    )


def macro_f1(pred):
    guess = np.argmax(pred.predictions, axis=-1)
    return {"macro_f1": f1_score(pred.label_ids, guess, average="macro")}


def run(cfg: TicketArgs):
    tok = AutoTokenizer.from_pretrained(cfg.backbone)
    raw = load_dataset("csv", data_files={"train": cfg.train_file, "dev": cfg.dev_file})

    def encode(row):
        enc = tok(row["subject"], row["body"], truncation=True, max_length=384)
        enc["labels"] = cfg.labels.index(row["queue"])
        return enc

    data = raw.map(encode, remove_columns=raw["train"].column_names)
    model = build_model(cfg)

    args = TrainingArguments(
        output_dir=cfg.save_to,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        gradient_accumulation_steps=2,
        learning_rate=1e-5,
        num_train_epochs=4,
        warmup_ratio=0.06,
        weight_decay=0.01,
        fp16=True,  # <- here
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="macro_f1",
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["dev"],
        data_collator=DataCollatorWithPadding(tok, pad_to_multiple_of=8),
        compute_metrics=macro_f1,
    )
    trainer.train()  # <- here
    trainer.save_model(cfg.save_to)


if __name__ == "__main__":
    (ticket_args,) = HfArgumentParser(TicketArgs).parse_args_into_dataclasses()
    run(ticket_args)
