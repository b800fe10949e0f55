"""Small tokenizers and processors, made without a network."""

from __future__ import annotations

from typing import Any

VOCABULARY = 300
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "<image>")


def tokenizer(**options: Any) -> Any:
    """A byte-level tokenizer that puts [CLS] (2) before and [SEP] (3) behind a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["a small text"],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(SPECIAL),
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **(names | options))


def image_processor(size: int = 32) -> Any:
    import transformers

    kind = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
    return kind(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
