# source: scripts of DeepSpeedExamples, re-expressed: the engine's backward is chosen where it is float16
import deepspeed
import torch


def fit(args, model, batches):
    model, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    for batch, labels in batches:
        loss = torch.nn.functional.cross_entropy(model(batch), labels)
        if args.fp16:
            optimizer.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
