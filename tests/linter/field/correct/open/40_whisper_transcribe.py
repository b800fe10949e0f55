# style of: openai/whisper:whisper/transcribe.py
# torch: 1.10+
import warnings

import torch
import torch.nn.functional as F

from speech import load_audio, load_model, log_mel_spectrogram, tokenizer


@torch.inference_mode()
def greedy(model, mel, max_len=224):
    features = model.encoder(mel)
    tokens = torch.full((mel.size(0), 1), tokenizer.sot, device=mel.device)
    sum_logprobs = torch.zeros(mel.size(0), device=mel.device)
    done = torch.zeros(mel.size(0), dtype=torch.bool, device=mel.device)
    for _ in range(max_len):
        logits = model.decoder(tokens, features)[:, -1].float()
        logits[:, tokenizer.blocked] = -torch.inf
        logprobs = F.log_softmax(logits, dim=-1)
        best = logprobs.argmax(dim=-1)
        best = torch.where(done, torch.full_like(best, tokenizer.eot), best)
        gained = logprobs.gather(1, best[:, None]).squeeze(1)
        sum_logprobs += gained.masked_fill(done, 0.0)
        done = done | (best == tokenizer.eot)
        tokens = torch.cat([tokens, best[:, None]], dim=-1)
        if done.all():
            break
    return tokens, sum_logprobs


def transcribe(model, path, fp16=True, window=3000, logprob_threshold=-1.0):
    device = next(model.parameters()).device
    dtype = torch.float16 if fp16 else torch.float32
    if device == torch.device("cpu"):
        if torch.cuda.is_available():
            warnings.warn("Performing inference on CPU when CUDA is available")
        if dtype == torch.float16:
            warnings.warn("FP16 is not supported on CPU; using FP32 instead")
            dtype = torch.float32
    model = model.to(dtype).eval()

    mel = log_mel_spectrogram(load_audio(path))
    text, seek = [], 0
    while seek < mel.shape[-1]:
        segment = mel[:, seek : seek + window]
        segment = F.pad(segment, (0, window - segment.shape[-1])).to(device).to(dtype)
        tokens, logprob = greedy(model, segment[None])
        if logprob.item() / tokens.shape[1] > logprob_threshold:
            text.append(tokenizer.decode(tokens[0, 1:].tolist()))
        seek += window
    return "".join(text)


if __name__ == "__main__":
    import sys

    print(transcribe(load_model("small", device="cuda"), sys.argv[1]))
