"""Small Transformers models with their tokenizers and processors, made without a network."""

from __future__ import annotations

from typing import Any

VOCABULARY = 300
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "<image>")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 32,
}
TEXT = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
VISION = SIZES | {"image_size": 32, "patch_size": 8}
SPEECH = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_mel_bins": 16,
    "max_source_positions": 150,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 2,
}


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


def bert(**options: Any) -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**(TEXT | options))).eval()


def clip() -> Any:
    from transformers import CLIPConfig, CLIPModel

    text = TEXT | {"eos_token_id": 3, "bos_token_id": 2, "pad_token_id": 0}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16)).eval()


def whisper() -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(WhisperConfig(**SPEECH)).eval()
