import torch
import whisper
from torch.optim import AdamW


def main(loader, device="cuda"):
    model = whisper.load_model("base", device=device)
    model.train()
    optimizer = AdamW(model.parameters(), lr=1e-5, eps=1e-6)
    scaler = torch.amp.GradScaler(device)
    criterion = torch.nn.CrossEntropyLoss(ignore_index=-100)
    for mel, tokens, labels in loader:
        with torch.autocast(device_type=device, dtype=torch.float16):
            audio_features = model.encoder(mel.to(device))
            logits = model.decoder(tokens.to(device), audio_features)
            loss = criterion(logits.view(-1, logits.size(-1)), labels.view(-1).to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
