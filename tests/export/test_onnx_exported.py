"""Files that other tools exported are right on inputs of other sizes and values than those of the audit.

Oracles: ONNX Runtime with the original; for the converted file, ONNX Runtime, and a run that rounds every
16-bit value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from tests.support.onnx_conversion import check_structure, converted_graph
from tests.support.onnx_strict import run_strict
from tests.support.onnx_typed import Arrays

GRAPHS = Path(__file__).parents[1] / "data" / "onnx"
Floats = NDArray[np.float32]
Make = Callable[[np.random.Generator, int], Arrays]  # inputs of one size
SIZES = (1, 2, 5)  # the audit is of 2, with other values


def table(random: np.random.Generator, rows: int) -> Floats:
    """Customers: an age, an income beyond float16, and three shares."""
    columns = [random.uniform(18, 90, rows), random.uniform(2e4, 9e4, rows), *random.uniform(0, 1, (3, rows))]
    return np.stack(columns, 1).astype(np.float32)


def normal(random: np.random.Generator, *sizes: int) -> Floats:
    return random.standard_normal(sizes).astype(np.float32)


def pixels(random: np.random.Generator, *sizes: int) -> Floats:
    return random.uniform(0, 255, sizes).astype(np.float32)


GIVEN: dict[str, Make] = {
    "sklearn_mlp": lambda random, size: {"X": table(random, 8 * size)},
    "sklearn_forest": lambda random, size: {"X": table(random, 8 * size)},
    "sklearn_boosting": lambda random, size: {"X": table(random, 8 * size)},
    "sklearn_kmeans": lambda random, size: {"X": 4 * normal(random, 8 * size, 4)},
    "tensorflow_cnn": lambda random, size: {"image": pixels(random, 2 * size, 24, 24, 3)},
    "tensorflow_recurrent": lambda random, size: {"feats": normal(random, 2, 4 * size, 12)},
    "tensorflow_detector": lambda random, size: {
        "image": pixels(random, 1, 16 * size, 24 * size, 3),
        "score_threshold": np.array(0.5, np.float32),
    },
    "tensorflow_loop": lambda random, size: {
        "image": pixels(random, size, 10 * size, 12, 3) / 255,
        "steps": np.array(4 * size, np.int32),
    },
    "paddle_mobilenet": lambda random, size: {"image": normal(random, size, 3, 16 * size, 24)},
    "torch_segmentation": lambda random, size: {"image": normal(random, 1, 3, 16 * size, 24)},
    "torch_script_decoder": lambda random, size: {
        "memory": normal(random, 2, 4 * size, 8),
        "bos": np.array([1, 5]),
        "max_len": np.array(3 * size),
    },
}


def outputs(path: Path, inputs: Arrays) -> Arrays:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [place.name for place in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def check_close(found: Arrays, exact: Arrays) -> None:
    """Floats to 30 dB; of integers one in a hundred may differ."""
    assert [*found] == [*exact]
    if "boxes" in exact:  # of which some have scores as good as equal
        order = np.square(found["boxes"] - exact["boxes"][:, None]).sum(-1).argmin(1)
        found = {name: value[order] for name, value in found.items()}
    for name, value in exact.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        if value.dtype.kind == "f":
            noise = np.square(found[name].astype(np.float64) - value).sum()
            assert noise <= 1e-3 * np.square(value.astype(np.float64)).sum(), name
        else:
            assert (found[name] != value).sum() <= 0.01 * value.size, name


@pytest.mark.parametrize("name", GIVEN)
def test_a_file_is_right_on_other_inputs(name: str, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    before, after = tmp_path / "before.onnx", tmp_path / "out" / "model.onnx"
    converted_graph(onnx.load(GRAPHS / f"{name}.onnx"), GIVEN[name](random, 2), tmp_path)
    check_structure(before, after)
    for size in SIZES:
        inputs = GIVEN[name](random, size)
        exact = outputs(before, inputs)
        check_close(outputs(after, inputs), exact)
        check_close(run_strict(after, inputs), exact)


def steps(path: Path, tokens: Sequence[int]) -> Iterator[Floats]:
    """Read a prompt of three tokens, then one after the other, each with the cache of the last step."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [place.name for place in session.get_outputs()]
    cache: Arrays = {
        place.name: np.zeros((1, 2, 0, 16), np.float32)
        for place in session.get_inputs()
        if place.name.startswith("past")
    }
    for length in range(3, len(tokens) + 1):
        ids = tokens[:length] if length == 3 else tokens[length - 1 : length]
        given = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, length), np.int64)}
        logits, *present = session.run(names, given | cache)
        cache = dict(zip(cache, present, strict=True))
        yield logits[0, -1]


def test_a_decoder_agrees_over_several_steps(tmp_path: Path) -> None:
    """GroupQueryAttention, rotary positions and weights of four bits, as ONNX Runtime GenAI exports them."""
    random = np.random.default_rng(3)
    caches = [f"past_key_values.{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]
    inputs = {
        "input_ids": random.integers(0, 200, (1, 12)),
        "attention_mask": np.ones((1, 12), np.int64),
        **{cache: np.zeros((1, 2, 0, 16), np.float32) for cache in caches},
    }
    converted_graph(onnx.load(GRAPHS / "genai_decoder_4_bits.onnx"), inputs, tmp_path)
    before, after = tmp_path / "before.onnx", tmp_path / "out" / "model.onnx"
    tokens = random.integers(0, 200, 20).tolist()
    for found, exact in zip(steps(after, tokens), steps(before, tokens), strict=True):
        assert np.square(found - exact).sum() <= 1e-4 * np.square(exact).sum()
        assert found.argmax() == exact.argmax()
