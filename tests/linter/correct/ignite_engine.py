from ignite.engine import Engine, Events
from torch.amp import GradScaler, autocast


def create_trainer(model, optimizer, criterion, device):
    scaler = GradScaler("cuda")

    def train_step(engine, batch):
        model.train()
        x, y = batch[0].to(device), batch[1].to(device)
        optimizer.zero_grad()
        with autocast("cuda"):
            y_pred = model(x)
            loss = criterion(y_pred, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    trainer = Engine(train_step)

    @trainer.on(Events.ITERATION_COMPLETED(every=100))
    def log(engine):
        print(engine.state.output.item())

    return trainer
