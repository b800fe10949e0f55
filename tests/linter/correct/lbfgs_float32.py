import torch


def fit(model, x, y):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=20)

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(10):
        optimizer.step(closure)
