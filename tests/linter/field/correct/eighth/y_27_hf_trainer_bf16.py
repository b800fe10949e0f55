# why correct: weights are loaded in float32 and the Trainer runs bf16 autocast; compute_loss upcasts logits and a metric preprocessor casts before NumPy sees anything.
import os
from typing import Dict

import evaluate
import numpy as np
import torch
import torch.nn.functional as F
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

CHECKPOINT = os.environ.get("BASE", "xlm-roberta-large")
LABELS = ["entail", "neutral", "contradict"]


class FocalTrainer(Trainer):
    def __init__(self, *args, gamma=2.0, class_weight=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.gamma = gamma
        self.class_weight = class_weight

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logp = F.log_softmax(outputs.logits.float(), dim=-1)
        picked = logp.gather(1, labels[:, None]).squeeze(1)
        weight = 1.0
        if self.class_weight is not None:
            weight = self.class_weight.to(labels.device)[labels]
        loss = (-weight * (1 - picked.exp()) ** self.gamma * picked).mean()
        return (loss, outputs) if return_outputs else loss


def keep_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if isinstance(logits, tuple):
        logits = logits[0]
    return logits.float()


f1 = evaluate.load("f1")


def metrics(pred) -> Dict[str, float]:
    guess = np.argmax(pred.predictions, axis=-1)
    return f1.compute(predictions=guess, references=pred.label_ids, average="macro")


def main():
    set_seed(13)
    tok = AutoTokenizer.from_pretrained(CHECKPOINT)
    raw = load_dataset("json", data_files={"train": "nli_train.jsonl", "validation": "nli_dev.jsonl"})
    data = raw.map(lambda r: tok(r["premise"], r["hypothesis"], truncation=True, max_length=256), batched=True,
                   remove_columns=["premise", "hypothesis"])
    counts = np.bincount(data["train"]["labels"], minlength=len(LABELS))
    weight = torch.tensor(counts.sum() / (len(LABELS) * counts), dtype=torch.float32)

    model = AutoModelForSequenceClassification.from_pretrained(CHECKPOINT, num_labels=len(LABELS))
    args = TrainingArguments(
        output_dir="nli",
        bf16=True,
        bf16_full_eval=False,
        tf32=True,
        per_device_train_batch_size=32,
        max_grad_norm=1.0,
        learning_rate=1e-5,
        warmup_ratio=0.06,
        num_train_epochs=5,
        evaluation_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="f1",
        report_to="none",
    )
    trainer = FocalTrainer(
        model=model, args=args, train_dataset=data["train"], eval_dataset=data["validation"],
        data_collator=DataCollatorWithPadding(tok, pad_to_multiple_of=8), compute_metrics=metrics,
        preprocess_logits_for_metrics=keep_logits, class_weight=weight,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    resume = os.path.isdir("nli") and any(d.startswith("checkpoint-") for d in os.listdir("nli"))
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model("nli/best")


if __name__ == "__main__":
    main()
