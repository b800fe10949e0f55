from mytools import autocast_for, clip_and_step, save_checkpoint, scale_and_backward


def train(model, loader, optimizer, criterion, scaler, args):
    for x, y in loader:
        optimizer.zero_grad()
        with autocast_for(args):
            loss = criterion(model(x), y)
        scale_and_backward(scaler, loss)
        clip_and_step(scaler, optimizer, model.parameters())
        scaler.update()
    save_checkpoint(model, optimizer, scaler)
