import torch
from model import GPT

model = torch.compile(GPT().to("cuda"))
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
train_loader = iter([])

for step in range(1000):
    optimizer.zero_grad()
    loss_accum = 0.0
    for micro_step in range(8):
        x, y = next(train_loader)
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            logits, loss = model(x, y)
        loss = loss / 8
        loss_accum += loss.detach()
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    torch.cuda.synchronize()
    print(f"step {step} loss {loss_accum.item():.6f} norm {norm:.4f}")
