# style of: UKPLab/sentence-transformers:sentence_transformers/fit_mixin.py
# torch: 1.10+
import torch
from torch import nn
from tqdm.autonotebook import trange


def fit(
    train_objectives,
    optimizer_class=torch.optim.AdamW,
    optimizer_params=None,
    make_scheduler=None,
    epochs=1,
    steps_per_epoch=None,
    max_grad_norm=1.0,
    use_amp=False,
    device="cuda",
):
    """train_objectives: pairs (dataloader, loss module); one optimizer each, one scaler for all."""
    optimizer_params = optimizer_params or {"lr": 2e-5}
    if use_amp:
        from torch.cuda.amp import autocast

        scaler = torch.cuda.amp.GradScaler()

    dataloaders = [loader for loader, _ in train_objectives]
    loss_models = [loss.to(device) for _, loss in train_objectives]
    optimizers = [optimizer_class(m.parameters(), **optimizer_params) for m in loss_models]
    schedulers = [make_scheduler(o) if make_scheduler else None for o in optimizers]
    if steps_per_epoch is None:
        steps_per_epoch = min(len(loader) for loader in dataloaders)
    iterators = [iter(loader) for loader in dataloaders]
    global_step = 0

    for _ in trange(epochs, desc="Epoch"):
        for loss_model in loss_models:
            loss_model.train()
        for _ in trange(steps_per_epoch, desc="Iteration", smoothing=0.05):
            for idx, loss_model in enumerate(loss_models):
                optimizer, scheduler = optimizers[idx], schedulers[idx]
                skip_scheduler = False
                try:
                    features, labels = next(iterators[idx])
                except StopIteration:
                    iterators[idx] = iter(dataloaders[idx])
                    features, labels = next(iterators[idx])
                labels = labels.to(device)
                features = [{k: v.to(device) for k, v in f.items()} for f in features]

                optimizer.zero_grad()
                if use_amp:
                    with autocast():
                        loss_value = loss_model(features, labels)
                    scale_before_step = scaler.get_scale()
                    scaler.scale(loss_value).backward()
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(loss_model.parameters(), max_grad_norm)
                    scaler.step(optimizer)
                    scaler.update()
                    skip_scheduler = scaler.get_scale() < scale_before_step
                else:
                    loss_value = loss_model(features, labels)
                    loss_value.backward()
                    nn.utils.clip_grad_norm_(loss_model.parameters(), max_grad_norm)
                    optimizer.step()

                if scheduler is not None and not skip_scheduler:
                    scheduler.step()
            global_step += 1
    return global_step
