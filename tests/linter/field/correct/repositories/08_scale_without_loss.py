# source: the samplers of several repositories, re-expressed: an object whose scale() takes no loss
import torch


def fit(model, box, frames, optimizer, gradient_scaler=None):
    sampler = box.sampler
    for frame in frames:
        size = sampler.scale()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(frame, size).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sampler.step(optimizer)
