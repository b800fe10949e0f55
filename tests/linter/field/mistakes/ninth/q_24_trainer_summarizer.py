# source: https://github.com/pytorch/pytorch/issues/74739
# mistake: the weights are loaded in float16 and trained with fp16=True, so the Trainer's scaler meets float16 gradients and raises "Attempting to unscale FP16 gradients"
# severity: error
from dataclasses import dataclass, field

import numpy as np
import torch
from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)


@dataclass
class Setup:
    model_name: str = field(default="google/pegasus-large")
    data_file: str = field(default="reports.jsonl")
    source_len: int = 1024
    target_len: int = 256
    output: str = "runs/summaries"


def preprocess(tok, setup):
    def fn(batch):
        enc = tok(batch["body"], truncation=True, max_length=setup.source_len)
        enc["labels"] = tok(text_target=batch["summary"], truncation=True, max_length=setup.target_len)["input_ids"]
        return enc
    return fn


def length_metric(tok):
    def fn(pred):
        ids = np.where(pred.predictions < 0, tok.pad_token_id, pred.predictions)
        return {"gen_len": float(np.mean([(row != tok.pad_token_id).sum() for row in ids]))}
    return fn


def main():
    (setup,) = HfArgumentParser(Setup).parse_args_into_dataclasses()
    tok = AutoTokenizer.from_pretrained(setup.model_name)
    model = AutoModelForSeq2SeqLM.from_pretrained(setup.model_name, torch_dtype=torch.float16)  # <- here
    model.config.use_cache = False

    data = load_dataset("json", data_files=setup.data_file)["train"].train_test_split(0.05, seed=1)
    data = data.map(preprocess(tok, setup), batched=True, remove_columns=data["train"].column_names)

    targs = Seq2SeqTrainingArguments(
        output_dir=setup.output,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=16,
        learning_rate=5e-5,
        warmup_ratio=0.05,
        num_train_epochs=3,
        fp16=True,  # <- here
        gradient_checkpointing=True,
        predict_with_generate=True,
        generation_max_length=setup.target_len,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=20,
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=targs,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        data_collator=DataCollatorForSeq2Seq(tok, model=model, label_pad_token_id=-100),
        compute_metrics=length_metric(tok),
    )
    trainer.train()  # <- here
    trainer.save_model(setup.output)
    tok.save_pretrained(setup.output)


if __name__ == "__main__":
    main()
