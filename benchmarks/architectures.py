"""Shows which architectures of Transformers run in PyTorch but cannot be audited.

Builds every third model type of Transformers, in alphabetical order, with random weights in a small
configuration: reduces settings whose names denote sizes, in several ways until the model runs. Scans those
that run, each in its own process.

    python -m benchmarks.architectures [--jobs 2] [--limit 180] [--json FILE] [TYPE ...]
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import ampaudit
from ampaudit.core.errors import AuditError, first_line
from ampaudit.source.processor import needed_inputs, random_input
from benchmarks.options import parser

ROWS, LENGTH = 2, 8
MAX_PARAMETERS = 20_000_000
# by the first pattern that a setting's name matches: its largest allowed value
SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size(_per_layer_input)?$", 128),
    (r"per_tok$|top_?k$|moe_k$", 2),
    (r"n_group$|topk_group$|shared_experts$|first_k_dense_replace$", 1),
    (r"experts$", 4),
    (r"key_value_heads$|kv_heads$", 2),
    (r"heads?$", 4),
    (r"^v_head_dim$", 16),  # that of queries has two parts
    (r"head_dim$|_rank$", 8),
    (r"layers?$|blocks$|depth$", 2),
    (r"intermediate|ffn|mlp_dim|inner|feedforward", 64),
    (r"hidden_size|hidden_dim|d_model$|embed|n_embd$|width$|^dim$|latent_dim|_dim$", 32),
    (r"positions|position_embeddings$|max_seq", 64),
    (r"image_size$", 32),
)
DEPTHS = re.compile(r"depths?$|layers?$|blocks$")
LENGTHS = re.compile(r"vocab_size$|layers?$|blocks$|depth$|positions|position_embeddings$")
# a process that another thread starts meanwhile would inherit the child's end of a pipe, and keep it open
_STARTING = threading.Lock()
TOKEN = re.compile(r"(\w+)_(token_id|token_index|token_idx)$")


@dataclass(frozen=True, slots=True)
class Reduction:
    """One way to make a configuration small."""

    grouped: bool = True  # fewer heads for keys and values
    narrow: bool = True  # not only fewer layers and tokens
    wide: bool = False  # two heads of 128, for positions in several parts
    layers: int = 2
    divisor: int = 8  # of sizes in lists


REDUCTIONS = (
    *(Reduction(), Reduction(grouped=False), Reduction(grouped=False, layers=4)),
    *(Reduction(wide=True), Reduction(narrow=False), Reduction(divisor=1)),
)
WIDE = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}


@dataclass(frozen=True, slots=True)
class Row:
    """The outcome for one model type.

    Attributes:
        name: the model type.
        ran: whether a small model of it ran without ampaudit.
        code: exit code of the scan; ``None`` if there was no scan, or it did not end.
        reason: why it did not run, or was not audited.
    """

    name: str
    ran: bool = False
    code: int | None = None
    reason: str = ""

    @property
    def audited(self) -> bool:
        """Whether the scan ended with a verdict."""
        return self.code in (0, 1)


def every_third_type() -> list[str]:
    """Return every third model type."""
    return sorted(CONFIG_MAPPING_NAMES)[::3]


def reduced_settings(kind: type[Any], settings: Mapping[str, Any], way: Reduction) -> dict[str, Any]:
    """Return the reduced values of a configuration's settings, including those of nested configurations.

    Settings that stay as they are have no entry.
    """
    reduced: dict[str, Any] = {}
    known = inspect.signature(kind).parameters
    for name, value in settings.items():
        if isinstance(value, Mapping) and value.get("model_type") in CONFIG_MAPPING_NAMES:
            part = transformers.CONFIG_MAPPING[value["model_type"]]
            reduced[name] = {"model_type": value["model_type"], **reduced_settings(part, value, way)}
        elif name not in known:
            continue  # follows from others
        elif isinstance(value, list) and value and all(type(item) is int for item in value):
            if way.narrow and DEPTHS.search(name):
                reduced[name] = [1] * len(value)
            elif way.narrow and "heads" in name:
                reduced[name] = [4] * len(value)
            elif way.narrow and min(value) >= 16 and re.search("size|dim|channels", name):
                reduced[name] = [max(item // way.divisor, 8) for item in value]
        elif type(value) is int and value > 0 and (way.narrow or LENGTHS.search(name)):
            most = next((size for pattern, size in SIZES if re.search(pattern, name)), value)
            if DEPTHS.search(name):
                most = way.layers
            elif "heads" in name and not way.grouped:
                most = 4
            if way.wide:
                most = WIDE.get(name, most)
            if most < value:
                reduced[name] = most
    tokens = [name for name, value in settings.items() if TOKEN.search(name) and type(value) is int]
    return reduced | {
        name: number for number, name in enumerate(tokens) if settings[name] >= 128 and name in known
    }


def model_class(config: Any) -> Any:
    """Return the model class of a configuration: that of ``AutoModel``, if there is one."""
    mappings = ("MODEL_MAPPING", *sorted(n for n in dir(modeling_auto) if n.endswith("_MAPPING")))
    for mapping in mappings:
        found = getattr(modeling_auto, mapping).get(type(config), None)
        if found is not None:
            return found[0] if isinstance(found, tuple | list) else found
    modeling = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    for found in vars(modeling).values():
        kind = getattr(found, "config_class", None)
        if isinstance(found, type) and kind is type(config) and "forward" in vars(found):
            return found
    raise LookupError("no model class has this configuration")


def build_model(name: str, way: Reduction) -> nn.Module:
    """Build a small model with random weights."""
    kind = transformers.CONFIG_MAPPING[name]
    config = kind(**reduced_settings(kind, kind().to_dict(), way))
    factory = model_class(config)
    with torch.device("meta"):
        if sum(p.numel() for p in factory(config).parameters()) > MAX_PARAMETERS:
            raise ValueError("it stays large")
    torch.manual_seed(0)
    model: nn.Module = factory(config).eval()
    return model


def generate_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Return random inputs, including those of an encoder or decoder inside the model."""
    inputs = {}
    parameters = list(inspect.signature(model.forward).parameters)
    for name in [name for name in needed_inputs(model) if name in parameters] or parameters[:1]:
        if name in ("hidden_states", "inputs_embeds", "encoder_hidden_states"):
            inputs[name] = torch.randn(ROWS, LENGTH, model.config.hidden_size)
        else:
            inputs[name] = random_input(model, name, ROWS)
        if name.endswith("input_ids"):
            inputs[name] = inputs[name][:, :LENGTH]
    return inputs


def examine(name: str) -> Iterator[Row]:
    """Build, run and scan one model type.

    Yield a row before the scan, which stands if the process is killed, and the final one after it.
    """
    reasons = []
    for way in REDUCTIONS:
        try:
            model = build_model(name, way)
            inputs = generate_inputs(model)
            with torch.no_grad():
                model(**inputs)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {first_line(error)}")
            continue
        yield Row(name, True, reason="the scan did not end")
        try:
            report = ampaudit.scan(model, inputs, policy="torch-cuda", dtype="float16")
            yield Row(name, True, report.exit_code)
        except AuditError as error:
            yield Row(name, True, error.exit_code, str(error).splitlines()[0])
        return
    yield Row(name, reason=reasons[0])


def _child(name: str, end: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for row in examine(name):
        end.send(row)
    end.send(None)


def in_a_process(name: str, limit: float) -> Row:
    """Examine a model type in a separate process."""
    # a fork of this process would share the locks of its threads
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_child.__module__, "ampaudit.audit.scan"])
    with _STARTING:
        ours, theirs = context.Pipe()
        child = context.Process(target=_child, args=(name, theirs))
        child.start()
        theirs.close()
    row, end = Row(name, reason="it did not run within the limit"), time.monotonic() + limit
    try:
        while ours.poll(max(end - time.monotonic(), 0)) and (found := ours.recv()) is not None:
            row = found
    except EOFError:
        pass
    child.kill()
    child.join()
    print(f"{row.name:32} ran: {row.ran!s:5} exit: {row.code} {row.reason}", flush=True)
    return row


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield lines of counts, and one for each model type that runs but is not audited."""
    ran = [row for row in rows if row.ran]
    codes = Counter(row.code for row in ran if row.audited)
    yield f"{len(rows)} model types, {len(ran)} ran by themselves, {codes.total()} of these were audited"
    yield f"exit code 0: {codes[0]}, 1: {codes[1]}"
    yield from (f"{row.name:32} exit {row.code}: {row.reason}" for row in ran if not row.audited)


def main(arguments: Sequence[str] | None = None) -> None:
    words = parser(__doc__)
    words.add_argument("types", nargs="*", help="examine these model types only")
    words.add_argument("--jobs", type=int, default=2, help="processes at a time")
    words.add_argument("--limit", type=float, default=180, help="seconds for each model type")
    options = words.parse_args(arguments)
    names = options.types or (["bert-generation"] if options.smoke else every_third_type())
    ampaudit.scan(nn.Linear(8, 8), torch.ones(1, 8))  # imports what the processes need
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda name: in_a_process(name, options.limit), names))
    print("\n".join(table(rows)))
    if options.json:
        result = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
