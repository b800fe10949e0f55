import torch
from torchao.optim import AdamW8bit
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.bfloat16).cuda()
optimizer = AdamW8bit(model.parameters(), lr=1e-5, bf16_stochastic_round=True)


def train(loader, accumulate):
    for i, batch in enumerate(loader):
        loss = model(**batch, labels=batch["input_ids"]).loss / accumulate
        loss.backward()
        if (i + 1) % accumulate == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
