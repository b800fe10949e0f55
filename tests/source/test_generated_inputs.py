"""Inputs of model directories: of the user's files, of built-in samples, and at random."""

from __future__ import annotations

import io
import json
import subprocess
import wave
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from ampaudit import bench, convert, plan, scan
from ampaudit.core.errors import AuditError, InputError, UsageError
from ampaudit.core.source_config import SourceConfig
from ampaudit.render.render import OUTPUT_FORMATS, as_file, for_terminal
from ampaudit.report.model import GIVEN, InputsInfo
from ampaudit.source import Batch, ModelSource
from ampaudit.source.generated_inputs import GeneratedInputs, InputRequest, check_ids, generate_inputs, sounds
from ampaudit.source.open import open_source
from ampaudit.views.verdict import verdict_words
from tests.support.processors import TEXT, VISION, VOCABULARY, bert, clip, image_processor, tokenizer, whisper

Cli = Callable[..., subprocess.CompletedProcess[str]]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


def made(model: Any, folder: Path, *parts: Any, batches: int | None = None, **files: Path) -> GeneratedInputs:
    """Save a model's configuration and parts, and make its inputs of them."""
    model.config.save_pretrained(folder)
    for part in parts:
        part.save_pretrained(folder)
    given = {kind: str(path) for kind, path in files.items()}
    found = generate_inputs(model, InputRequest(files=given, batches=batches, seed=0), folder)
    with torch.no_grad():
        for batch in found["batches"]:
            model(**batch)
    check_ids(model, found["batches"])
    return found


def recording(path: Path, seconds: float, rate: int = 8000, width: int = 2) -> None:
    t = np.arange(int(seconds * rate)) / rate
    values = (0.5 * np.sin(2 * np.pi * 440 * t) * 2**31).astype("<i4")
    data = values.view(np.uint8).reshape(-1, 4)[:, 4 - width :].tobytes()
    with wave.open(str(path), "wb") as stream:
        stream.setnchannels(1)
        stream.setsampwidth(width)
        stream.setframerate(rate)
        stream.writeframes(data)


def test_a_tokenizer_makes_ids_of_built_in_sentences(tmp_path: Path) -> None:
    words = tokenizer()
    found = made(bert(), tmp_path, words, batches=2)
    assert (found["origin"], found["detail"]) == ("sample", "built-in text samples")
    first, second = (batch["input_ids"] for batch in found["batches"])
    assert first.shape == second.shape
    assert not torch.equal(first, second)
    assert words.decode(first[0], skip_special_tokens=True).startswith("The kettle was")
    assert first[0, 0] == 2
    lengths = [int(row.sum()) for batch in found["batches"] for row in batch["attention_mask"]]
    assert min(lengths) == len("No.") + 2  # the bytes between [CLS] and [SEP]
    assert torch.equal(found["batches"][1]["attention_mask"] == 0, second == 0)


def test_lines_and_paragraphs_of_a_text_file(tmp_path: Path) -> None:
    words, text = tokenizer(), tmp_path / "own.txt"
    text.write_text("\n".join(f"line {number}" for number in range(10)), encoding="utf-8")
    found = made(bert(), tmp_path, words, text=text)
    assert (found["origin"], found["detail"]) == ("file", "own.txt: 10 text samples")
    rows = [row for batch in found["batches"] for row in batch["input_ids"]]
    assert [words.decode(row, skip_special_tokens=True) for row in rows] == [
        f"line {number % 10}" for number in range(12)
    ]
    found = made(bert(), tmp_path, words, text=text, batches=1)
    assert found["detail"] == "own.txt: 4 of 10 text samples"
    text.write_text("one\ntwo\n\nthree\n", encoding="utf-8")
    found = made(bert(), tmp_path, words, text=text)
    assert [words.decode(row, skip_special_tokens=True) for row in found["batches"][0]["input_ids"]] == [
        "one two",
        "three",
    ]


def test_a_long_text_ends_where_the_model_does(tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text("word " * 500, encoding="utf-8")
    found = made(bert(), tmp_path, tokenizer(), text=text)
    assert found["batches"][0]["input_ids"].shape == (1, 62)
    assert found["detail"] == "long.txt: 1 text sample, 1 cut to 62 tokens"
    text.write_text("\n".join(["word " * 500, "short", "a" * 60, "b" * 61, "word " * 9]), encoding="utf-8")
    found = made(bert(), tmp_path, text=text)
    assert found["detail"] == "long.txt: 5 text samples, 2 cut to 62 tokens"  # [CLS] and [SEP] are tokens
    found = made(whisper(), tmp_path / "m", tokenizer(), text=text)
    assert found["detail"].startswith("long.txt: 5 text samples, 4 cut to 30 tokens; random input_features")


def test_messages_pass_the_chat_template(tmp_path: Path) -> None:
    words, text = tokenizer(chat_template=TEMPLATE), tmp_path / "chat.jsonl"
    lines = [{"messages": [{"role": "user", "content": "hello"}]}, {"text": "alone"}]
    text.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    found = made(bert(), tmp_path, words, text=text)
    shown = [words.decode(row).rstrip("[PAD]") for row in found["batches"][0]["input_ids"]]
    assert shown == ["<user>hello", "<user>alone"]
    loud = made(bert(), tmp_path, words, text=text.rename(tmp_path / "chat.JSONL"))
    assert torch.equal(loud["batches"][0]["input_ids"], found["batches"][0]["input_ids"])
    (tmp_path / "chat.JSONL").rename(text)
    assert found["detail"] == "chat.jsonl: 2 text samples in the chat template"
    assert made(bert(), tmp_path)["detail"] == "built-in text samples in the chat template"
    with pytest.raises(InputError, match="no chat template"):
        made(bert(), tmp_path / "other", tokenizer(), text=text)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('only pictures') }}", "{{ messages[0].none.none }}"]
)
def test_a_template_that_refuses_text_is_left_out(tmp_path: Path, template: str) -> None:
    words = tokenizer(chat_template=template)
    found = made(bert(), tmp_path, words)
    assert found["origin"] == "sample"
    assert found["detail"] == "built-in text samples without the chat template, which fails"
    ids = found["batches"][0]["input_ids"][0]
    assert words.decode(ids, skip_special_tokens=True).startswith("The kettle was")
    assert ids[0] == 2
    text = tmp_path / "chat.jsonl"
    text.write_text('{"messages": [{"role": "user", "content": "hello"}]}', encoding="utf-8")
    with pytest.raises(InputError, match="its processor failed: "):
        made(bert(), tmp_path, text=text)


def test_a_template_writes_the_first_token_of_a_pictured_chat_once(tmp_path: Path) -> None:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
    from transformers import LlavaProcessor as Processor

    config = LlavaConfig(
        text_config=LlamaConfig(**TEXT), vision_config=CLIPVisionConfig(**VISION), image_token_index=4
    )
    parts = "{% for c in m.content %}{{ c.text if c.type == 'text' else '<image>' }}{% endfor %}"
    processor = Processor(
        image_processor(),
        tokenizer(image_token="<image>"),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=f"{{% for m in messages %}}[CLS]{parts}{{% endfor %}}",
    )
    found = made(LlavaForConditionalGeneration(config).eval(), tmp_path, processor)
    assert found["detail"].startswith("built-in text samples in the chat template")
    ids = found["batches"][0]["input_ids"]
    assert ids[:, :2].tolist() == [[2, 4]] * len(ids)
    assert (ids == 4).sum(1).tolist() == [16] * len(ids)  # the patches


def test_a_tokenizer_without_padding_pads_with_its_end(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=200, n_embd=32, n_layer=1, n_head=4)
    )
    found = made(model, tmp_path, tokenizer(pad_token=None, eos_token="[SEP]"))["batches"][0]
    assert bool((found["input_ids"][found["attention_mask"] == 0] == 3).all())


def test_two_towers_get_both_kinds(tmp_path: Path) -> None:
    found = made(clip(), tmp_path / "parts", image_processor(), tokenizer())
    assert found["origin"] == "sample"
    assert found["detail"] == "built-in text samples; built-in image samples"
    shapes = {name: tuple(tensor.shape[:2]) for name, tensor in found["batches"][0].items()}
    assert shapes["pixel_values"] == (2, 3)
    found = made(clip(), tmp_path / "text", tokenizer())
    assert (found["origin"], found["detail"]) == ("random", "built-in text samples; random pixel_values")
    found = made(clip(), tmp_path / "none")
    assert found["origin"] == "random"
    assert found["detail"] == (
        "random input_ids, attention_mask, pixel_values: no tokenizer or processor in the model's directory"
    )


def test_an_encoder_of_sound_gets_sound_and_its_decoder_ids(tmp_path: Path) -> None:
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=3)
    for seconds, name in ((0.5, "a.wav"), (1.0, "b.wav"), (1.5, "c.wav")):
        recording(tmp_path / name, seconds)
    found = made(whisper(), tmp_path / "m", extractor, tokenizer(eos_token="[SEP]"), audio=tmp_path)
    assert found["origin"] == "sample"  # what it is to say is not the user's
    assert found["detail"].startswith("built-in text samples; ")
    assert found["detail"].endswith(": 3 audio samples")
    batch = found["batches"][0]
    assert batch["input_features"].shape == (2, 16, 300)
    assert bool((batch["decoder_input_ids"][:, 0] == 2).all())
    assert made(whisper(), tmp_path / "n")["batches"][0]["input_features"].shape == (2, 16, 300)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_recordings_of_every_width_give_the_same_sound(tmp_path: Path, width: int) -> None:
    if width == 1:  # unsigned
        t = np.arange(8000) / 8000
        with wave.open(str(tmp_path / "a.wav"), "wb") as stream:
            stream.setparams((1, 1, 8000, 0, "NONE", ""))
            stream.writeframes((128 + 64 * np.sin(2 * np.pi * 440 * t)).astype(np.uint8).tobytes())
    else:
        recording(tmp_path / "a.wav", 1.0, width=width)
    (found,) = sounds(tmp_path, 16000).items
    assert found.shape == (16000,)
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    assert np.abs(found - expected)[:-2].max() < 0.03


def test_images_of_a_directory(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(3):
        Image.new("RGB", (40, 30), (200, 10 * number, 0)).save(tmp_path / f"{number}.png")
    found = made(clip(), tmp_path / "m", image_processor(), tokenizer(), images=tmp_path)
    assert found["detail"].endswith(": 3 image samples")
    red = [float(batch["pixel_values"][:, 0].std()) for batch in found["batches"]]
    assert red == pytest.approx([0.0, 0.0], abs=1e-5)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG nothing")
    with pytest.raises(InputError, match=r"broken\.png: cannot be decoded"):
        made(clip(), tmp_path / "m", images=tmp_path)


def test_a_tokenizer_that_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    found = made(bert(), tmp_path)
    assert found["origin"] == "random"
    assert "cannot load the tokenizer" in found["detail"]
    text = tmp_path / "own.txt"
    text.write_text("words", encoding="utf-8")
    with pytest.raises(InputError, match="--text: Transformers cannot load the tokenizer"):
        made(bert(), tmp_path, text=text)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    ids = torch.tensor([[1, VOCABULARY]])
    with pytest.raises(
        InputError, match=f"the tokenizer gives token {VOCABULARY}; the model has {VOCABULARY}"
    ):
        check_ids(bert(), [{"input_ids": ids}])
    check_ids(bert(), [{"input_ids": ids - 1}])


@pytest.mark.parametrize("options", [{}, {"trust": True}, {"stream": True}], ids=str)
def test_a_directory_with_another_models_tokenizer_is_refused(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    bert(vocab_size=100).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"the tokenizer gives token \d+; the model has 100"):
        open_source(str(tmp_path), SourceConfig(**options))


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    empty, torn = tmp_path / "empty.txt", tmp_path / "torn.jsonl"
    empty.write_text("\n\n", encoding="utf-8")
    torn.write_text('{"text": "a"}\n{"text"\n', encoding="utf-8")
    for path, words in ((empty, "no text in it"), (torn, r"torn\.jsonl:2: not valid JSON")):
        with pytest.raises(InputError, match=words):
            made(bert(), tmp_path / "m", tokenizer(), text=path)
    with pytest.raises(InputError, match="--images: BertModel takes none"):
        made(bert(), tmp_path / "m", images=tmp_path)
    with pytest.raises(InputError, match="no recordings in it"):
        sounds(tmp_path, 16000)


def test_a_model_file_has_its_own_inputs(model_file: Callable[..., Path], tmp_path: Path) -> None:
    body = "class Net(nn.Linear):\n    def __init__(self):\n        super().__init__(4, 4)\n"
    path = model_file(body + "def example_inputs():\n    return torch.randn(2, 4)\n")
    (tmp_path / "own.txt").write_text("words", encoding="utf-8")
    with pytest.raises(UsageError, match=r"--text: .*model\.py is not a Hugging Face directory") as caught:
        open_source(str(path), SourceConfig(text=tmp_path / "own.txt"))
    assert "example_inputs()" in caught.value.hint
    assert scan(str(path)).run.inputs.origin == "given"


def test_every_format_says_that_inputs_are_made_up() -> None:
    batch = Batch((torch.randn(2, 4),))
    made_up = InputsInfo("random", "random x")
    source = ModelSource("m", "object", torch.nn.Linear(4, 4), (batch,), inputs=made_up)
    report = scan(source)
    assert verdict_words(report)[1].endswith("; inputs: random inputs")
    assert " on random inputs: " in report.headline
    assert report.run.extent.startswith("1 batch of random inputs on ")
    given = scan(replace(source, inputs=GIVEN))
    for form in OUTPUT_FORMATS:
        assert "random" in as_file(report, form), form
        assert "random inputs" not in as_file(given, form), form


@pytest.mark.parametrize("origin", ["random", "sample", "given"])
def test_other_commands_say_that_inputs_are_made_up(tmp_path: Path, origin: Any) -> None:
    info = InputsInfo(origin, "seen" if origin != "given" else "")
    words = {"random": "random inputs", "sample": "built-in samples", "given": ""}[origin]
    source = ModelSource("m", "object", torch.nn.Linear(4, 4), (Batch((torch.randn(2, 4),)),), inputs=info)
    _, converted = convert(source, output=tmp_path / "out")
    assert converted is not None
    for document in (bench(source, modes=("fp32",), repeats=1), converted):
        assert document.inputs == info
        stream = io.StringIO()
        Console(file=stream, width=200).print(for_terminal(document, 0))
        assert json.loads(as_file(document, "json"))["inputs"]["origin"] == origin
        for text in (document.headline, stream.getvalue(), as_file(document, "markdown")):
            assert ("random inputs" in text, "built-in samples" in text) == (
                words == "random inputs",
                words == "built-in samples",
            )
        assert ("seen" in stream.getvalue()) == bool(words)
    (note,) = (note for note in plan(source).notes if "after 1 batch" in note)
    assert f"after 1 batch{' of ' * bool(words)}{words} in FP32" in note


def test_a_directory_is_scanned_on_the_users_text(tmp_path: Path, cli: Cli) -> None:
    bert().save_pretrained(tmp_path / "m")
    words = tokenizer()
    words.save_pretrained(tmp_path / "m")
    (tmp_path / "own.txt").write_text("some words of mine\nand more\n", encoding="utf-8")
    done = cli("scan", tmp_path / "m", "--text", tmp_path / "own.txt", "--format", "json")
    assert json.loads(done.stdout)["run"]["inputs"] == {"origin": "file", "detail": "own.txt: 2 text samples"}
    (tmp_path / "own.py").write_text("", encoding="utf-8")
    for options, said in (
        ({"text": tmp_path / "none.txt"}, "[Nn]o such file"),
        ({"text": tmp_path}, "[Nn]o such file"),
        ({"images": tmp_path / "own.txt"}, "no such directory"),
        ({"text": tmp_path / "own.txt", "inputs": tmp_path / "own.py"}, "--inputs and --text both"),
    ):
        with pytest.raises(AuditError, match=said):
            open_source(str(tmp_path / "m"), SourceConfig(**options))
