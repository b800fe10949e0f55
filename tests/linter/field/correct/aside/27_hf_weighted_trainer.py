# style of: huggingface/transformers:docs/source/en/main_classes/trainer.md
# torch: 2.1+
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments


class WeightedLossTrainer(Trainer):
    def __init__(self, *args, class_weights=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.class_weights = class_weights
        # the loss below is a per-batch mean: let the Trainer divide it over the accumulation window
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits.float()
        weights = None
        if self.class_weights is not None:
            weights = self.class_weights.to(device=logits.device, dtype=logits.dtype)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), weight=weights)
        return (loss, outputs) if return_outputs else loss


def accuracy(eval_pred):
    predictions, labels = eval_pred
    return {"accuracy": float((predictions.argmax(-1) == labels).mean())}


def train(train_dataset, eval_dataset, out="clf"):
    args = TrainingArguments(
        output_dir=out,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=2e-5,
        max_grad_norm=1.0,
        num_train_epochs=3,
        fp16=torch.cuda.is_available() and not torch.cuda.is_bf16_supported(),
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        eval_strategy="epoch",
        save_strategy="epoch",
    )
    trainer = WeightedLossTrainer(
        model=AutoModelForSequenceClassification.from_pretrained("roberta-base", num_labels=3),
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=accuracy,
        class_weights=torch.tensor([1.0, 2.0, 4.0]),
    )
    trainer.train()
    return trainer.evaluate()
