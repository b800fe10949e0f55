"""Tiny, randomly initialised models of thirteen architectures, for tests of structure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class ZooModel:
    model: nn.Module
    kwargs: dict[str, Any]


def _ids(vocab: int = 99, length: int = 12) -> torch.Tensor:
    return torch.randint(3, vocab, (2, length))


def bert() -> ZooModel:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    return ZooModel(BertModel(config), {"input_ids": _ids(), "attention_mask": torch.ones(2, 12).long()})


def gpt2() -> ZooModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=99, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    return ZooModel(GPT2LMHeadModel(config), {"input_ids": _ids()})


def t5() -> ZooModel:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return ZooModel(T5ForConditionalGeneration(config), {"input_ids": _ids(), "decoder_input_ids": _ids()})


_DECODER = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def llama() -> ZooModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    return ZooModel(LlamaForCausalLM(LlamaConfig(**_DECODER)), {"input_ids": _ids()})


def mistral() -> ZooModel:
    from transformers import MistralConfig, MistralForCausalLM

    return ZooModel(MistralForCausalLM(MistralConfig(**_DECODER)), {"input_ids": _ids()})


def mixtral() -> ZooModel:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_DECODER, num_local_experts=4)
    return ZooModel(MixtralForCausalLM(config), {"input_ids": _ids()})


def gemma3() -> ZooModel:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(**_DECODER, head_dim=8, sliding_window=8)
    return ZooModel(Gemma3ForCausalLM(config), {"input_ids": _ids()})


def mamba() -> ZooModel:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=99, hidden_size=32, state_size=8, num_hidden_layers=2)
    return ZooModel(MambaForCausalLM(config), {"input_ids": _ids()})


def deberta_v2() -> ZooModel:
    from transformers import DebertaV2Config, DebertaV2Model

    config = DebertaV2Config(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        max_position_embeddings=64,
    )
    return ZooModel(DebertaV2Model(config), {"input_ids": _ids()})


def whisper() -> ZooModel:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=99,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=16,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    inputs = {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": _ids()}
    return ZooModel(WhisperForConditionalGeneration(config), inputs)


def vit() -> ZooModel:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    return ZooModel(ViTModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)})


def swin() -> ZooModel:
    from transformers import SwinConfig, SwinModel

    config = SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    return ZooModel(SwinModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)})


def resnet() -> ZooModel:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
    return ZooModel(ResNetForImageClassification(config), {"pixel_values": torch.randn(2, 3, 32, 32)})


ZOO: dict[str, Callable[[], ZooModel]] = {
    build.__name__: build
    for build in (
        bert, gpt2, t5, llama, vit, resnet, swin, mixtral, mamba, deberta_v2, gemma3, whisper, mistral,
    )
}  # fmt: skip
