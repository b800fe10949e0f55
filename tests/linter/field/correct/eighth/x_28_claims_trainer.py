# why correct: the Trainer keeps its own training_step; only compute_loss is changed, and it works on float32 logits of a model with float32 weights
import numpy as np
import torch
import torch.nn.functional as F
from datasets import load_dataset
from sklearn.metrics import f1_score
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
)

BASE = "FacebookAI/roberta-large"
LABELS = ["supported", "refuted", "mixed", "unverifiable"]


class FocalTrainer(Trainer):
    def __init__(self, *args, gamma=2.0, prior=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.gamma = gamma
        self.prior = prior

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs["labels"]
        outputs = model(**{k: v for k, v in inputs.items() if k != "labels"})
        logits = outputs.logits.float()
        if self.prior is not None:
            logits = logits + self.prior.to(logits.device).log()
        logp = F.log_softmax(logits, dim=-1).gather(1, labels[:, None]).squeeze(1)
        loss = -((1 - logp.exp()).clamp(min=0) ** self.gamma * logp).mean()
        return (loss, outputs) if return_outputs else loss


def metrics(pred):
    guess = np.argmax(pred.predictions, axis=-1)
    return {"macro_f1": f1_score(pred.label_ids, guess, average="macro")}


def main():
    tok = AutoTokenizer.from_pretrained(BASE)
    data = load_dataset("json", data_files={"train": "claims/train.jsonl", "validation": "claims/dev.jsonl"})

    def encode(rows):
        enc = tok(rows["claim"], rows["evidence"], truncation=True, max_length=512)
        enc["labels"] = [LABELS.index(v) for v in rows["verdict"]]
        return enc

    data = data.map(encode, batched=True, remove_columns=data["train"].column_names)
    counts = np.bincount(data["train"]["labels"], minlength=len(LABELS))
    prior = torch.tensor(counts / counts.sum(), dtype=torch.float32)
    model = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=len(LABELS))

    args = TrainingArguments(
        output_dir="claims_run",
        fp16=True,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        learning_rate=1e-5,
        warmup_ratio=0.06,
        weight_decay=0.01,
        max_grad_norm=1.0,
        num_train_epochs=10,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="macro_f1",
        save_total_limit=2,
    )
    trainer = FocalTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        data_collator=DataCollatorWithPadding(tok),
        compute_metrics=metrics,
        callbacks=[EarlyStoppingCallback(3)],
        prior=prior,
    )
    trainer.train()
    trainer.save_model("claims_best")


if __name__ == "__main__":
    main()
