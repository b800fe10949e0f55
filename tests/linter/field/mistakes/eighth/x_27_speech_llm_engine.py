# source: X-LANCE/SLAM-LLM issue #144
# mistake: the loss is divided by the accumulation steps although engine.backward divides by them too, so the gradients are 8 times too small
# severity: error
import argparse

import deepspeed
import torch
from torch import nn
from transformers import AutoModelForCausalLM, WhisperModel

from slm.data import SpeechText

DS = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,  # <- here
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "initial_scale_power": 14, "loss_scale_window": 500},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.0}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1000, "warmup_max_lr": 1e-4}},
}


class SpeechLLM(nn.Module):
    def __init__(self, speech, llm, stride=5):
        super().__init__()
        self.speech = WhisperModel.from_pretrained(speech).encoder.requires_grad_(False)
        self.llm = AutoModelForCausalLM.from_pretrained(llm).requires_grad_(False)
        self.stride = stride
        inner = self.speech.config.d_model * stride
        self.bridge = nn.Sequential(nn.Linear(inner, 2048), nn.ReLU(), nn.Linear(2048, self.llm.config.hidden_size))

    def forward(self, mel, ids, labels):
        with torch.no_grad():
            h = self.speech(mel).last_hidden_state
        b, t, d = h.shape
        t = t - t % self.stride
        h = self.bridge(h[:, :t].reshape(b, t // self.stride, d * self.stride))
        text = self.llm.get_input_embeddings()(ids)
        ignore = labels.new_full(h.shape[:2], -100)
        out = self.llm(inputs_embeds=torch.cat([h, text], 1), labels=torch.cat([ignore, labels], 1))
        return out.loss


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--local_rank", type=int, default=-1)
    ap.add_argument("--manifest", default="train.jsonl")
    ap.add_argument("--epochs", type=int, default=3)
    args = ap.parse_args()
    deepspeed.init_distributed()

    model = SpeechLLM("openai/whisper-large-v2", "lmsys/vicuna-7b-v1.5")
    data = SpeechText(args.manifest)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        training_data=data,
        collate_fn=data.collate,
        config=DS,
    )
    accum = DS["gradient_accumulation_steps"]  # <- here
    for epoch in range(args.epochs):
        engine.train()
        for i, (mel, ids, labels) in enumerate(loader):
            mel = mel.to(engine.device, dtype=torch.float16)
            ids, labels = ids.to(engine.device), labels.to(engine.device)
            loss = engine(mel, ids, labels)
            loss = loss / accum  # <- here
            engine.backward(loss)  # <- here
            engine.step()
            if engine.global_rank == 0 and i % 100 == 0:
                print(epoch, i, loss.item() * accum)
        engine.save_checkpoint("ckpt", tag=f"epoch{epoch}")


if __name__ == "__main__":
    main()
