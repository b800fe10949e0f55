# why correct: the student is float32 and trained with fp16=True, only the frozen teacher is stored in float16, and the divergence is computed in float32
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from datasets import load_dataset
from transformers import (AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer,
                          TrainingArguments)


@dataclass
class DistillArguments(TrainingArguments):
    temperature: float = 2.0
    alpha: float = 0.5


class DistillTrainer(Trainer):
    def __init__(self, *args, teacher, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher.eval().requires_grad_(False).to(self.args.device)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        with torch.no_grad():
            soft = self.teacher(**{k: v for k, v in inputs.items() if k != "labels"}).logits
        t = self.args.temperature
        kl = F.kl_div(
            F.log_softmax(outputs.logits.float() / t, dim=-1),
            F.log_softmax(soft.float() / t, dim=-1),
            log_target=True,
            reduction="batchmean",
        ) * t * t
        loss = self.args.alpha * outputs.loss + (1 - self.args.alpha) * kl
        return (loss, outputs) if return_outputs else loss


def main(student_name="distilroberta-base", teacher_name="roberta-large-mnli"):
    tok = AutoTokenizer.from_pretrained(student_name)
    teacher = AutoModelForSequenceClassification.from_pretrained(teacher_name, torch_dtype=torch.float16)
    student = AutoModelForSequenceClassification.from_pretrained(student_name, num_labels=3)

    order = {0: 2, 1: 1, 2: 0}
    data = load_dataset("glue", "mnli")
    data = data.map(lambda r: {**tok(r["premise"], r["hypothesis"], truncation=True, max_length=128),
                               "labels": order.get(r["label"], -100)},
                    remove_columns=data["train"].column_names)

    args = DistillArguments(
        output_dir="runs/distill",
        per_device_train_batch_size=64,
        learning_rate=3e-5,
        num_train_epochs=3,
        warmup_ratio=0.06,
        max_grad_norm=1.0,
        fp16=True,
        eval_strategy="epoch",
        save_strategy="epoch",
        label_names=["labels"],
    )
    trainer = DistillTrainer(
        model=student, teacher=teacher, args=args,
        train_dataset=data["train"], eval_dataset=data["validation_matched"],
        data_collator=DataCollatorWithPadding(tok),
        compute_metrics=lambda p: {"acc": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )
    trainer.train(resume_from_checkpoint=False)
    trainer.save_model("runs/distill/final")


if __name__ == "__main__":
    main()
