import torch.nn.functional as F
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")


def main(model, optimizer, data, scheduler):
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    model.train()
    for epoch in range(10):
        for source, targets in data:
            optimizer.zero_grad()
            output = model(source)
            loss = F.cross_entropy(output, targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
