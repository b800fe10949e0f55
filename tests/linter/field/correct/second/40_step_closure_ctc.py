"""
# style of: SeanNaren/deepspeech.pytorch:deepspeech_pytorch/model.py (as a functional loop)
# correct: a closure built by make_step holds model, optimizer and scaler; CTC runs in float32 outside autocast, and the one-cycle schedule follows the flag returned by the closure.
# torch: 2.3+
"""
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F


class SpeechNet(nn.Module):
    def __init__(self, n_mels=80, hidden=512, vocab=29):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(n_mels, hidden, 11, stride=2, padding=5), nn.BatchNorm1d(hidden), nn.Hardtanh(0, 20))
        self.rnn = nn.LSTM(hidden, hidden, num_layers=3, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(2 * hidden, vocab)

    def forward(self, mel):
        h, _ = self.rnn(self.conv(mel).transpose(1, 2))
        return self.fc(h)

    @staticmethod
    def out_lengths(lengths):
        return (lengths + 2 * 5 - 11) // 2 + 1


def ctc(logits, lengths, text, text_lengths):
    log_probs = F.log_softmax(logits.float(), dim=-1).transpose(0, 1)
    return F.ctc_loss(log_probs, text, lengths, text_lengths, blank=0, zero_infinity=True)


def make_step(model, optimizer, scaler, max_norm):
    forward = partial(torch.autocast, "cuda", torch.float16)

    def step(mel, lengths, text, text_lengths):
        with forward():
            logits = model(mel)
        loss = ctc(logits, model.out_lengths(lengths), text, text_lengths)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach(), norm, scaler.get_scale() >= before

    return step


def train(loader, epochs=40, lr=1.5e-4, max_norm=400.0, resume=None):
    model = SpeechNet().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * len(loader))
    scaler = torch.amp.GradScaler("cuda")
    members = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    first = 0
    if resume:
        state = torch.load(resume, map_location="cuda")
        for name, member in members.items():
            member.load_state_dict(state[name])
        first = state["epoch"] + 1
    step = make_step(model, optimizer, scaler, max_norm)

    for epoch in range(first, epochs):
        model.train()
        for i, batch in enumerate(loader):
            loss, norm, stepped = step(*(t.cuda(non_blocking=True) for t in batch))
            if stepped:
                schedule.step()
            if i % 100 == 0:
                print(f"{epoch}/{i}: loss {loss.item():.3f} norm {norm.item():.1f}")
        torch.save({"epoch": epoch, **{k: m.state_dict() for k, m in members.items()}}, "speech.pt")
