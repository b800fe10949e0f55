import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    get_cosine_schedule_with_warmup,
)

PROMPT = "### Instruction:\n{instruction}\n\n### Response:\n{output}"


def load_data(tokenizer, max_len):
    raw = load_dataset("yahma/alpaca-cleaned", split="train")

    def encode(row):
        text = PROMPT.format(**row) + tokenizer.eos_token
        return tokenizer(text, truncation=True, max_length=max_len)

    return raw.map(encode, remove_columns=raw.column_names)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", default="meta-llama/Llama-2-7b-hf")
    parser.add_argument("--max_len", type=int, default=512)
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--accum", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--out", default="lora-alpaca")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.base)
    tokenizer.pad_token = tokenizer.unk_token
    base = AutoModelForCausalLM.from_pretrained(args.base, torch_dtype=torch.float16, device_map={"": 0})
    base.config.use_cache = False
    lora = LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, lora)
    model = model.half()  # <- here
    model.print_trainable_parameters()

    data = load_data(tokenizer, args.max_len)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    loader = DataLoader(data, args.micro_batch, shuffle=True, collate_fn=collator, drop_last=True)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=args.lr, weight_decay=0.0)
    updates = args.epochs * (len(loader) // args.accum)
    scheduler = get_cosine_schedule_with_warmup(optimizer, int(0.03 * updates), updates)
    scaler = torch.amp.GradScaler("cuda")

    model.train()
    for epoch in range(args.epochs):
        optimizer.zero_grad(set_to_none=True)
        running = 0.0
        for step, batch in enumerate(loader):
            if step >= len(loader) // args.accum * args.accum:
                break
            batch = {k: v.cuda() for k, v in batch.items()}
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(**batch).loss / args.accum
            running += loss.item()
            scaler.scale(loss).backward()
            if (step + 1) % args.accum == 0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 1.0)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
                print(f"epoch {epoch} step {step} loss {running:.4f} lr {scheduler.get_last_lr()[0]:.2e}")
                running = 0.0
        model.save_pretrained(f"{args.out}/epoch_{epoch}")


if __name__ == "__main__":
    main()
