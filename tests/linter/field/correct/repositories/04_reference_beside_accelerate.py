# source: the self-tests of Accelerate, re-expressed: the reference is trained without it
import torch
from accelerate import Accelerator


def reference(batches):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def gradient_of(model, x):
    model(x).mean().backward()
    return next(model.parameters()).grad


def check(batches):
    expected = reference(batches)
    accelerator = Accelerator()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    for x, y in batches:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(expected.weight, model.weight)


def check_hook(x):
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    torch.testing.assert_close(gradient_of(model, x), gradient_of(torch.nn.Linear(4, 4), x))
