"""
# style of: huggingface/peft:examples/causal_language_modeling (own loop)
# correct: the base is loaded in float16 and frozen; only the adapters are trained and they are cast to float32 before the optimizer is made, so the scaler sees float32 gradients.
# torch: 2.3+
"""
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


def build(name):
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float16).to("cuda")
    for p in model.parameters():
        p.requires_grad = False
    config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    model.print_trainable_parameters()
    return model


def collate(tokenizer):
    def fn(rows):
        enc = tokenizer([r["text"] for r in rows], truncation=True, max_length=512, padding=True, return_tensors="pt")
        enc["labels"] = enc["input_ids"].masked_fill(enc["attention_mask"] == 0, -100)
        return enc

    return fn


@torch.no_grad()
def sample(model, tokenizer, prompt):
    model.eval()
    with torch.autocast("cuda", dtype=torch.float16):
        ids = tokenizer(prompt, return_tensors="pt").to("cuda")
        out = model.generate(**ids, max_new_tokens=64, do_sample=False)
    model.train()
    return tokenizer.decode(out[0], skip_special_tokens=True)


def main(rows, name="facebook/opt-1.3b", epochs=3, lr=2e-4, max_norm=0.3):
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = build(name)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=lr)
    scaler = torch.amp.GradScaler("cuda")
    loader = DataLoader(rows, batch_size=8, shuffle=True, collate_fn=collate(tokenizer))
    model.train()
    for epoch in range(epochs):
        total = 0.0
        for batch in loader:
            batch = {k: v.to("cuda") for k, v in batch.items()}
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(**batch).loss
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(trainable, max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            total += loss.item()
        print(f"epoch {epoch}: {total / len(loader):.4f}")
        print(sample(model, tokenizer, "The weather today"))
    model.save_pretrained("lora-out")
