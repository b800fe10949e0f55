"""
# style of: huggingface/setfit and transformers:examples/pytorch/text-classification
# correct: fp16=True with float32 weights; only compute_loss and a callback are customised, the Trainer keeps scaling, clipping and stepping.
# torch: 2.0+ (transformers 4.40+)
"""
import numpy as np
import torch
from datasets import load_dataset
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class FocalTrainer(Trainer):
    def __init__(self, *args, gamma=2.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.gamma = gamma

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        # in float32: the logits are half under the Trainer's autocast
        logp = nn.functional.log_softmax(outputs.logits.float(), dim=-1)
        picked = logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        loss = (-((1 - picked.exp()).clamp(min=1e-6) ** self.gamma) * picked).mean()
        return (loss, outputs) if return_outputs else loss


class NormWatcher(TrainerCallback):
    """Warns on a large norm; the value in the log is the unscaled one."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and logs.get("grad_norm", 0.0) > 50:
            print(f"step {state.global_step}: gradient norm {logs['grad_norm']:.1f}")


def metrics(eval_pred):
    logits, labels = eval_pred
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


def main(name="distilroberta-base"):
    tokenizer = AutoTokenizer.from_pretrained(name)
    data = load_dataset("emotion").map(lambda r: tokenizer(r["text"], truncation=True), batched=True)
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=6)
    args = TrainingArguments(
        output_dir="focal",
        per_device_train_batch_size=32,
        learning_rate=3e-5,
        num_train_epochs=3,
        max_grad_norm=1.0,
        fp16=torch.cuda.is_available(),
        logging_steps=20,
    )
    trainer = FocalTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=metrics,
        callbacks=[NormWatcher()],
    )
    trainer.train()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
