# source: the accumulation of open_clip, re-expressed: each pass has the loss of the whole batch
import torch


def run_backward(loss, scaler):
    if scaler is not None:
        scaler.scale(loss).backward()
    else:
        loss.backward()


def train_epoch(model, batches, contrastive, optimizer, scaler, settings):
    images, features = [], []
    for index, batch in enumerate(batches):
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            features.append(model(batch))
        images.append(batch)
        if (index + 1) % settings.accum_freq:
            continue
        optimizer.zero_grad()
        for part in range(settings.accum_freq):
            with torch.autocast("cuda", dtype=torch.float16):
                own = model(images[part])
                whole = torch.cat(features[:part] + [own] + features[part + 1 :])
                loss = sum(contrastive(whole).values())
            run_backward(loss, scaler)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        images, features = [], []
