# why correct: Trainer with fp16=True does autocast, scaling, unscaling before max_grad_norm and checkpoints itself; the overridden loss works on float32 logits
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import (AutoImageProcessor, AutoModelForImageClassification, EarlyStoppingCallback, Trainer,
                          TrainingArguments)

CHECKPOINT = "google/vit-base-patch16-224-in21k"


@dataclass
class Collate:
    processor: object

    def __call__(self, items):
        px = self.processor([i["image"].convert("RGB") for i in items], return_tensors="pt")["pixel_values"]
        return {"pixel_values": px, "labels": torch.tensor([i["label"] for i in items])}


class ImbalancedTrainer(Trainer):
    def __init__(self, *args, class_counts, gamma=1.0, **kw):
        super().__init__(*args, **kw)
        w = 1.0 / np.sqrt(np.asarray(class_counts, dtype=np.float64) + 1)
        self.class_weight = torch.tensor(w / w.mean(), dtype=torch.float32)
        self.gamma = gamma

    def compute_loss(self, model, inputs, return_outputs=False, **unused):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits.float()
        logp = torch.log_softmax(logits, -1)
        ce = nn.functional.nll_loss(logp, labels, weight=self.class_weight.to(logits.device), reduction="none")
        pt = logp.gather(1, labels[:, None]).squeeze(1).exp()
        loss = ((1 - pt) ** self.gamma * ce).mean()
        return (loss, outputs) if return_outputs else loss


def accuracy(pred):
    guess = pred.predictions.argmax(-1)
    per = [(guess[pred.label_ids == c] == c).mean() for c in np.unique(pred.label_ids)]
    return {"balanced_accuracy": float(np.mean(per))}


def main(train, val, names, counts, out="derma-vit"):
    processor = AutoImageProcessor.from_pretrained(CHECKPOINT)
    model = AutoModelForImageClassification.from_pretrained(
        CHECKPOINT, num_labels=len(names), id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)})
    args = TrainingArguments(
        output_dir=out, fp16=True, max_grad_norm=1.0, gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False}, learning_rate=5e-5, warmup_ratio=0.1,
        per_device_train_batch_size=32, num_train_epochs=20, eval_strategy="epoch", save_strategy="epoch",
        load_best_model_at_end=True, metric_for_best_model="balanced_accuracy", remove_unused_columns=False)
    trainer = ImbalancedTrainer(model=model, args=args, train_dataset=train, eval_dataset=val,
                                data_collator=Collate(processor), compute_metrics=accuracy, class_counts=counts,
                                callbacks=[EarlyStoppingCallback(4)])
    trainer.train()
    trainer.save_model(out)
