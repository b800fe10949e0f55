"""Model files that a newcomer may write: each is audited, or is refused with one helpful line."""

from __future__ import annotations

import io
import json
import re
import sys
import textwrap
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from ampaudit.cli.program import run_command

Write = Callable[[str], Path]
_MAX_MESSAGE = 900
_LIBRARIES = ("/site-packages/", "/lib/python3", "contextlib.py", "copy.py")


class Case(NamedTuple):
    """What a forward does, or a whole get_model(); its inputs; the exit code and words of the message."""

    body: str
    inputs: str = "torch.randn(2, 8)"
    code: int = 2
    words: tuple[str, ...] = ()


def _forward(body: str, arguments: str = "x", init: str = "pass") -> str:
    return f"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        {init}

    def forward(self, {arguments}):
{textwrap.indent(textwrap.dedent(body), " " * 8)}

def get_model():
    return Model()
"""


def _model(expression: str) -> str:
    return f"def get_model():\n    return {expression}\n"


_BERT = (
    "BertModel(BertConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, "
    "intermediate_size=16))"
)
_IMPORT_BERT = "from transformers import BertConfig, BertModel\n"
_TINY = "nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))"
_SUBCLASS = """
class Int8Tensor(torch.Tensor):
    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)
    def __init__(self, values, scale):
        self.values_, self.scale = values, scale
    def __tensor_flatten__(self):
        return ["values_", "scale"], None
    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        plain = [a.values_.float() * a.scale if isinstance(a, cls) else a for a in args]
        return func(*plain, **(kwargs or {}))

def get_model():
    model = nn.Linear(8, 8)
    weight = Int8Tensor((model.weight.detach() * 127).to(torch.int8), torch.tensor(1 / 127))
    model.weight = nn.Parameter(weight, requires_grad=False)
    return model
"""

REFUSED = {
    # the model itself fails
    "shapes": Case(
        _forward("h = self.first(x)\nreturn self.second(h)", init="self.second = nn.Linear(9, 2)"),
        words=("model.py:12: the model itself fails in FP32 at 'return self.second(h)'", "(2x8 and 9x2)"),
    ),
    "attribute": Case(_forward("return x * self.scale"), words=("no attribute 'scale'", "float32[2, 8]")),
    "assertion": Case(
        _forward("assert x.shape[1] == 9, 'nine features'\nreturn x"), words=("nine features",)
    ),
    "missing key": Case(
        _forward("return self.first(batch['pixels'])", "batch"),
        "({'x': torch.randn(2, 8)},)",
        words=("KeyError: 'pixels'", "input[0]['x']: float32[2, 8]"),
    ),
    "dict as keywords": Case(
        _forward("return self.first(batch['x'])", "batch"),
        "{'x': torch.randn(2, 8)}",
        words=("a dict gives keyword arguments", "return a tuple with the dict in it"),
    ),
    "misspelt keyword": Case(
        _forward("return self.first(pixels) + mask", "pixels, mask"),
        "{'pixel': torch.randn(2, 8), 'mask': torch.ones(2, 8)}",
        words=("did you mean 'pixels'? forward(pixels, mask) has no 'pixel'",),
    ),
    "keyword taken by **kwargs": Case(
        _IMPORT_BERT + _model(_BERT),
        "{'input_id': torch.ones(2, 4).long()}",
        words=("did you mean 'input_ids'?", "in transformers/"),
    ),
    "too many inputs": Case(_model("nn.Linear(8, 8)"), "(torch.ones(2, 8), 1)", words=("too many",)),
    "too few inputs": Case(_model("nn.Bilinear(8, 8, 2)"), words=("missing", "forward(input1, input2)")),
    "integers": Case(
        _model("nn.Linear(8, 8)"), "torch.ones(2, 8).long()", words=("fails in FP32", "int64[2, 8]")
    ),
    "float64": Case(
        _model("nn.Linear(8, 8)"), "torch.ones(2, 8).double()", words=("fails in FP32", "float64[2, 8]")
    ),
    "floats for tokens": Case(_model("nn.Embedding(8, 8)"), words=("fails in FP32", "float32[2, 8]")),
    "lists": Case(_model("nn.Linear(8, 8)"), "[[1.0] * 8]", words=("must be Tensor", "input[0][0]: float")),
    "no forward": Case(_model("nn.ModuleList([nn.Linear(8, 8)])"), words=("give the module a forward()",)),
    "missing package": Case(
        _forward("import package_that_is_missing"), words=("at 'import", "install 'package_that_is_missing'")
    ),
    "recursion": Case(_forward("return self(x)"), words=("RecursionError",)),
    "an error without a text": Case(
        _forward("raise type('Odd', (Exception,), {'__str__': lambda self: self.missing})"),
        words=("fails in FP32",),
    ),
    "exit": Case(_forward("raise SystemExit(0)"), words=("the model itself fails", "SystemExit")),
    "long error": Case(
        _forward("raise ValueError('\\n\\nfirst' + 'y' * 9000)"), words=("ValueError: first",)
    ),
    "cuda inside": Case(
        _forward("return x + torch.zeros(8, device='cuda')"), words=("device=x.device", "at 'return x +")
    ),
    "inside a library": Case(
        _IMPORT_BERT + _forward("return self.bert(inputs_embeds=x)[0]", init=f"self.bert = {_BERT}"),
        "torch.randn(2, 8, 17)",
        words=("fails in FP32 at 'return self.bert(inputs_embeds=x)[0]'", "in transformers/models/bert/"),
    ),
    # it runs, and torch.export cannot follow it
    "sparse inside": Case(
        _forward("return torch.sparse.mm(torch.sparse_coo_tensor(i, torch.ones(3), (4, 4)), x)", "i, x"),
        "(torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.randn(4, 8))",
        3,
        ("does not trace sparse tensors",),
    ),
    "gradients inside": Case(
        _forward("x = x.requires_grad_()\nreturn torch.autograd.grad(self.first(x).sum(), x)[0]"),
        code=3,
        words=("torch.autograd.grad",),
    ),
    # kinds of models and inputs that are refused at once
    "traced": Case(
        _model(f"torch.jit.trace({_TINY}, torch.ones(2, 8))"), words=("TorchScript", "pass the Python model")
    ),
    "traced layer": Case(
        _forward(
            "return self.second(x)", init="self.second = torch.jit.trace(nn.Linear(8, 2), torch.ones(2, 8))"
        ),
        words=("layer second is TorchScript that was traced, frozen or loaded", "from which it was made"),
    ),
    "quantized graph": Case(
        "from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx\n"
        + _model(
            f"quantize_fx.convert_fx(quantize_fx.prepare_fx({_TINY}.eval(), get_default_qconfig_mapping(), "
            "(torch.ones(2, 8),)))"
        ),
        words=("computes on integers (convert_fx)", "before its weights are quantized"),
    ),
    "tensor subclass": Case(_SUBCLASS, words=("Int8Tensor", "torchao")),
    "sparse input": Case(_model("nn.Linear(8, 8)"), "torch.eye(8).to_sparse()", words=("sparse coo",)),
    "csr input": Case(_model("nn.Linear(8, 8)"), "torch.eye(8).to_sparse_csr()", words=("sparse csr",)),
    "sparse buffer": Case(
        _forward("return self.a @ x", init="self.register_buffer('a', torch.eye(2).to_sparse())"),
        words=("a is a tensor of layout sparse coo", "dense"),
    ),
    "nested input": Case(
        _model("nn.Linear(8, 8)"),
        "torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])",
        words=("input[0] is a nested tensor", "pad it"),
    ),
    "jagged input": Case(
        _model("nn.Linear(8, 8)"),
        "torch.nested.nested_tensor([torch.ones(2, 8)], layout=torch.jagged)",
        words=("input[0] is a nested tensor", "pad it"),
    ),
    "meta weights": Case(
        _model(f"{_TINY}.to('meta')"), words=("0.weight is on the meta device", "--stream --weights FILE")
    ),
    "meta everything": Case(
        _model(f"{_TINY}.to('meta')"), "torch.ones(2, 8, device='meta')", words=("meta device", "values")
    ),
    "meta input": Case(
        _model(_TINY), "torch.randn(2, 8, device='meta')", words=("input[0] is on the meta device",)
    ),
    "lazy": Case(_model("nn.LazyLinear(8)"), words=("lazy layer without a shape", "call the model once")),
    "returns nothing": Case(_forward("self.first(x)"), words=("returns no tensor",)),
    "returns a number": Case(_forward("return self.first(x).sum().item()"), words=("returns no tensor",)),
    "returns a generator": Case(_forward("yield self.first(x)"), words=("returns no tensor",)),
    # what the file's functions return
    "a generator of inputs": Case(
        _model(_TINY), "(torch.randn(2, 8) for _ in range(2))", words=("name the function batches()",)
    ),
    "no inputs returned": Case(_model(_TINY), "None", words=("return ()",)),
    "an array": Case(_model(_TINY), "__import__('numpy').zeros((2, 8))", words=("torch.from_numpy",)),
    "input on another device": Case(
        _model(_TINY),
        "torch.randn(2, 8).cuda()",
        words=("model.py:8: ", "create models and inputs on the CPU"),
    ),
    "a state_dict": Case(_model(f"{_TINY}.state_dict()"), words=("OrderedDict", "--weights")),
    "a factory with arguments": Case(
        "def get_model(width):\n    return nn.Linear(width, 8)\n",
        words=("'width'", "--args; it takes (width)"),
    ),
}
# code that depends on values: audited along its path, but there is no graph for all inputs
PATHS = {
    "branch": Case(
        _forward("if x.sum() > 0:\n    return self.first(x)\nreturn x"), code=3, words=("torch.where",)
    ),
    "packed inside": Case(
        _forward(
            "p = nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True)\n"
            "return nn.utils.rnn.pad_packed_sequence(self.rnn(p)[0], batch_first=True)[0]",
            "x, n",
            "self.rnn = nn.LSTM(4, 8, batch_first=True)",
        ),
        "(torch.randn(3, 5, 4), torch.tensor([5, 3, 2]))",
        3,
        ("does not trace packed sequences", "padded batch"),
    ),
    "generate": Case(
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        + _forward(
            "return self.gpt.generate(x, max_new_tokens=2)",
            init="self.gpt = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2))",
        ),
        "torch.ones(2, 4).long()",
        3,
        ("at 'return self.gpt.generate(", "in transformers/generation/", "one forward"),
    ),
    "a library's branch": Case(
        "from transformers import SwitchTransformersConfig as C, SwitchTransformersEncoderModel as M\n"
        + _model("M(C(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, num_experts=2))"),
        "torch.ones(2, 4).long()",
        3,
        ("in transformers/models/switch", "the code of transformers does this, not yours"),
    ),
    "operator without shapes": Case(
        "@torch.library.custom_op('difficult::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n"
        + _forward("return twice(self.first(x))"),
        code=3,
        words=("at 'return twice(self.first(x))'", "register_fake"),
    ),
    "packed input": Case(
        _model("nn.LSTM(4, 8)"),
        "(nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 4), torch.tensor([5, 3])),)",
        words=("input[0] is a packed sequence", "padded batch"),
    ),
}
AUDITED = {
    "half": Case(_model(f"{_TINY}.half()"), "torch.randn(2, 8).half()"),
    "half weights only": Case(_model(f"{_TINY}.half()")),
    "bfloat16": Case(_model(f"{_TINY}.bfloat16()"), "torch.randn(2, 8).bfloat16()"),
    "compiled": Case(_model(f"torch.compile({_TINY})")),
    "compiled layer": Case(_forward("return self.b(x)", init="self.b = torch.compile(nn.Linear(8, 2))")),
    "scripted": Case(_model(f"torch.jit.script({_TINY})")),
    "scripted layer": Case(
        _forward("return self.second(x)", init="self.second = torch.jit.script(nn.Linear(8, 2))")
    ),
    "dynamic quantization": Case(_model(f"torch.ao.quantization.quantize_dynamic({_TINY}, {{nn.Linear}})")),
    "compiled and parallel": Case(_model(f"torch.compile(nn.DataParallel({_TINY}))")),
    "no inputs": Case(
        _forward("return self.first(self.z)", "", "self.z = nn.Parameter(torch.ones(2, 8))"), "()"
    ),
    "dict in a tuple": Case(_forward("return self.first(b['x'])", "b"), "({'x': torch.randn(2, 8)},)"),
    "keywords": Case(_forward("return self.first(b['x'])", "**b"), "{'x': torch.randn(2, 8)}"),
    "flex attention": Case(
        "from torch.nn.attention.flex_attention import flex_attention\n"
        "flex = torch.compile(flex_attention)\n"
        + _forward("return flex(*[self.first(x)[:, None]] * 3, score_mod=lambda s, b, h, i, j: s + i - j)"),
        "torch.randn(2, 100, 8)",
    ),
}


@pytest.fixture
def scan(model_file: Write, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Scan the file of a case; return the exit code, standard output and the error's lines."""

    def run(case: Case, *options: str) -> tuple[int, str, str]:
        path = model_file(f"{case.body}\n\ndef example_inputs():\n    return {case.inputs}\n")
        monkeypatch.setattr(sys, "argv", ["ampaudit", "scan", str(path), "--format", "json", *options])
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = run_command()
        lines = err.getvalue()
        return code, out.getvalue(), lines[lines.find("ampaudit: ") :]

    return run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*REFUSED, *PATHS])
def test_a_refusal_is_one_helpful_line(scan: Callable[..., tuple[int, str, str]], name: str) -> None:
    case = {**REFUSED, **PATHS}[name]
    code, _, message = scan(case, *(["--static"] if name in PATHS else []))
    assert code == case.code, message
    for words in case.words:
        assert words in message
    assert re.fullmatch(r"ampaudit: .+\n  next: .+\n", message), message
    assert len(message) < _MAX_MESSAGE
    assert "Traceback" not in message
    assert "internal error" not in message
    assert not any(place in message for place in _LIBRARIES)
    assert not re.search(r"(rewrite|simplify) that line", message) or "model.py:" in message


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*AUDITED, *PATHS])
def test_unusual_models_are_audited(scan: Callable[..., tuple[int, str, str]], name: str) -> None:
    code, report, message = scan({**AUDITED, **PATHS}[name])
    assert code in (0, 1), message
    assert (json.loads(report)["path"] is not None) is (name in PATHS)
    assert '"_orig_mod' not in report
    assert '"module.' not in report
