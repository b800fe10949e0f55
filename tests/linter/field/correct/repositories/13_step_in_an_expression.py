# a conditional expression steps one way or the other
import torch

def run(model, batches, opt, policy):
    scaler = torch.amp.GradScaler("cuda") if policy.loss_scaling else None
    for batch in batches:
        loss = model.training_loss(batch, policy)
        if scaler:
            loss = scaler.scale(loss)
        loss.backward()
        if scaler:
            scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        (scaler.step(opt) if scaler else opt.step())
        if scaler:
            scaler.update()
        opt.zero_grad()
