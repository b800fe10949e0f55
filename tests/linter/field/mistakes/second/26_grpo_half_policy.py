"""
# source: https://github.com/Jaykef/ai-algorithms/issues/4
# mistake: the policy is loaded with torch_dtype=torch.float16 and then trained through a GradScaler; unscale_ refuses float16 gradients.
# severity: error
# torch: any
"""
import copy
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass
class TrainingConfig:
    lr: float = 1e-6
    num_generations: int = 4
    max_completion: int = 200
    beta: float = 0.04
    clip: float = 1.0
    fp16: bool = True


class GRPOTrainer:
    def __init__(self, model, tokenizer, reward_funcs, config, prompts):
        self.model = model
        self.tokenizer = tokenizer
        self.reward_funcs = reward_funcs
        self.config = config
        self.prompts = prompts
        self.ref_model = copy.deepcopy(model).eval().requires_grad_(False)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
        self.scaler = torch.amp.GradScaler("cuda") if config.fp16 else None

    def token_log_probs(self, model, ids):
        logits = model(ids).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    def rollout(self, prompt):
        enc = self.tokenizer([prompt] * self.config.num_generations, return_tensors="pt").to("cuda")
        with torch.no_grad():
            ids = self.model.generate(**enc, max_new_tokens=self.config.max_completion, do_sample=True)
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        rewards = torch.stack([f(prompt, texts) for f in self.reward_funcs]).sum(0).cuda()
        return ids, (rewards - rewards.mean()) / (rewards.std() + 1e-4)

    def compute_loss(self, ids, advantage):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.config.fp16):
            logp = self.token_log_probs(self.model, ids)
            with torch.no_grad():
                ref = self.token_log_probs(self.ref_model, ids)
        kl = torch.exp(ref - logp) - (ref - logp) - 1
        return -(torch.exp(logp - logp.detach()) * advantage[:, None] - self.config.beta * kl).mean()

    def train_step(self, prompt):
        ids, advantage = self.rollout(prompt)
        self.optimizer.zero_grad()
        loss = self.compute_loss(ids, advantage)
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
        return loss.item()


def main(prompts, reward_funcs, name="Qwen/Qwen2.5-0.5B-Instruct"):
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float16).to("cuda")  # <- here
    trainer = GRPOTrainer(model, tokenizer, reward_funcs, TrainingConfig(), prompts)
    for step, prompt in enumerate(prompts):
        print(step, trainer.train_step(prompt))
