# source: https://github.com/huggingface/transformers/issues/23165
# mistake: the model to be trained is loaded in float16 and given to a Trainer with fp16=True; its gradients are float16 and the scaler raises "Attempting to unscale FP16 gradients".
# severity: error
import json
from dataclasses import dataclass, field
from typing import Optional

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

TEMPLATE = "### Question:\n{question}\n\n### Answer:\n"


@dataclass
class ModelOptions:
    name: str = field(default="facebook/opt-1.3b")
    max_length: int = 1024
    freeze_embeddings: bool = False


@dataclass
class DataOptions:
    train_file: str = "train.jsonl"
    valid_file: Optional[str] = None


class QA(Dataset):
    def __init__(self, path, tok, max_length):
        self.items = []
        with open(path) as handle:
            for line in handle:
                row = json.loads(line)
                prompt = tok(TEMPLATE.format(question=row["question"]))["input_ids"]
                answer = tok(row["answer"] + tok.eos_token, add_special_tokens=False)["input_ids"]
                ids = (prompt + answer)[:max_length]
                labels = ([-100] * len(prompt) + answer)[:max_length]
                self.items.append({"input_ids": ids, "labels": labels, "attention_mask": [1] * len(ids)})

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def main():
    model_opt, data_opt = HfArgumentParser((ModelOptions, DataOptions)).parse_args_into_dataclasses()
    tok = AutoTokenizer.from_pretrained(model_opt.name, use_fast=False)
    model = AutoModelForCausalLM.from_pretrained(model_opt.name, torch_dtype=torch.float16)  # <- here
    model.config.use_cache = False
    if model_opt.freeze_embeddings:
        model.get_input_embeddings().weight.requires_grad_(False)

    train_set = QA(data_opt.train_file, tok, model_opt.max_length)
    valid_set = QA(data_opt.valid_file, tok, model_opt.max_length) if data_opt.valid_file else None

    args = TrainingArguments(
        output_dir="opt-qa",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        num_train_epochs=2,
        learning_rate=1e-5,
        lr_scheduler_type="cosine",
        warmup_ratio=0.03,
        fp16=True,  # <- here
        gradient_checkpointing=True,
        logging_steps=10,
        evaluation_strategy="epoch" if valid_set else "no",
        save_strategy="epoch",
        save_total_limit=1,
        report_to=[],
    )
    trainer = Trainer(
        model=model,  # <- here
        args=args,
        train_dataset=train_set,
        eval_dataset=valid_set,
        data_collator=DataCollatorForSeq2Seq(tok, padding=True, label_pad_token_id=-100),
    )
    trainer.train()  # <- here
    trainer.save_model("opt-qa/final")
    tok.save_pretrained("opt-qa/final")


if __name__ == "__main__":
    main()
