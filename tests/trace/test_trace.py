"""The trace: thirteen architectures, true dtypes, layers, lines, precision in the model's code."""

from __future__ import annotations

import copy
import functools
import warnings
from traceback import StackSummary

import pytest
import torch
from torch import nn
from torch.utils._traceback import CapturedTraceback

from ampaudit.core.errors import SourceError, TraceFailed
from ampaudit.core.formats import BFLOAT16, FLOAT16, NumberFormat
from ampaudit.policy import RuleSet, load_policy
from ampaudit.source import Batch
from ampaudit.trace import Role, TraceConfig, TracedModel, trace
from tests.support.oracle import after_half, ours, under_cuda_autocast
from tests.support.zoo import ZOO, ZooModel

CUDA = load_policy("torch-cuda")
# the model's own code counts tokens in float32 on a CPU and in integers on CUDA
ONLY_ON_CPU = {"mixtral": "aten.histc.default"}


def traced(
    model: nn.Module, batch: Batch, policy: str | RuleSet = "torch-cuda", form: NumberFormat = FLOAT16
) -> TracedModel:
    rules = policy if isinstance(policy, RuleSet) else load_policy(policy)
    return trace(model, batch.args, batch.kwargs, TraceConfig(rules, CUDA, form))


def without_cache(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model).requires_grad_(False)
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False
    return model


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_thirteen_architectures_trace_with_layers_and_lines(name: str, train: bool) -> None:
    zoo = ZOO[name]()
    zoo.model.train(train)
    before = {k: v.clone() for k, v in zoo.model.state_dict().items()}
    found = traced(zoo.model, Batch((), zoo.kwargs))
    modules = dict(zoo.model.named_modules())
    floats = [site for site in found.sites if site.dtype is not None]
    assert len(floats) > 30
    assert len({site.id for site in found.sites}) == len(found.sites)
    for site in found.sites:
        assert site.layer in modules, site
        assert site.source is not None, site
        assert site.source.line > 0
        assert "/torch/" not in site.source.file
    assert found.outputs
    assert zoo.model.training is train
    for key, value in zoo.model.state_dict().items():
        assert torch.equal(value, before[key])
        assert value.dtype == before[key].dtype


class NamedOtherwise(nn.Module):
    """A model whose code never runs in a function called forward."""

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    forward = step


class WholeStack:
    """The stack of torch's own tracer, from the first ``forward`` on."""

    extract = classmethod(lambda cls: cls())

    def summary(self) -> StackSummary:
        frames = CapturedTraceback.extract().summary()[:-1]  # without this one
        start = next((i for i, frame in enumerate(frames) if frame.name == "forward"), len(frames))
        return StackSummary.from_list(frames[start:])


@pytest.mark.parametrize("name", ["bert", "t5", "mamba", ""])
def test_sites_have_the_lines_of_torchs_own_stack_traces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo = ZOO[name]() if name else ZooModel(NamedOtherwise(), {"x": torch.randn(3)})
    model = without_cache(zoo.model.eval())

    def lines() -> list[object]:
        sites = traced(model, Batch((), zoo.kwargs)).sites
        return [(site.id, site.source, site.caller) for site in sites]

    ours = lines()
    monkeypatch.setattr("ampaudit.trace.interpose.ModelStack", WholeStack)
    assert ours == lines()


@pytest.mark.parametrize("name", ZOO)
def test_half_gives_the_dtypes_of_a_real_half_model(name: str) -> None:
    zoo = ZOO[name]()
    model = without_cache(zoo.model).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = after_half(model, zoo.kwargs, torch.float16)
    assert ours(traced(model, Batch((), zoo.kwargs), "half")) == expected


@pytest.mark.parametrize("name", ZOO)
def test_torch_cuda_gives_the_dtypes_of_real_cuda_autocast(name: str) -> None:
    zoo = ZOO[name]()
    model = without_cache(zoo.model).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = under_cuda_autocast(model, zoo.kwargs, torch.float16)
    found = ours(traced(model, Batch((), zoo.kwargs)))
    assert [op for op in found if op[0] != ONLY_ON_CPU.get(name)] == expected


class Author(nn.Module):
    """Every way in which an author chooses a precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.first(x)
        up = h.float()
        normed = up * torch.rsqrt(up.pow(2).mean(-1, keepdim=True) + 1e-6)
        h = self.weight * normed.to(h.dtype)
        if h.dtype == torch.float16:
            h = h.clamp(-60000, 60000)
        with torch.autocast("cuda", enabled=False):
            off = torch.matmul(h.float(), h.float().t())
        with torch.no_grad():
            h = h + self.shift
        low = torch.matmul(h, h.t())
        mask = torch.full_like(low, torch.finfo(low.dtype).min)
        return {
            "off": off,
            "low": low,
            "mask": mask,
            "loss": nn.functional.cross_entropy(low, torch.arange(4, device=low.device)),
        }


class AuthorAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x = self.first(x)
        return x * 2


class KeywordDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        weights = torch.softmax(h, dim=-1, dtype=torch.float32).to(h.dtype)
        total = h.sum(-1, keepdim=True) + h.norm(dim=-1, keepdim=True)
        return torch.addcmul(total.to(h.dtype).expand_as(h), weights, h.float()) + h.square()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [Author, KeywordDtype, AuthorAutocast])
def test_authors_precision_equals_torch(kind: type[nn.Module], dtype: torch.dtype) -> None:
    model = kind().eval().requires_grad_(False)
    x = torch.randn(4, 8)
    form = FLOAT16 if dtype is torch.float16 else BFLOAT16
    kwargs = {"x": x}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        half = after_half(model, kwargs, dtype)
        cuda = under_cuda_autocast(model, kwargs, dtype)
        found = ours(traced(model, Batch((), kwargs), form=form))
    if kind is Author:
        # we look into cross_entropy_loss, whose first half stays in 16 bits
        assert cuda.pop() == ("aten.cross_entropy_loss.default", "torch.float32")
        assert found.pop() == ("aten.nll_loss.default", "torch.float32")
        assert found.pop() == ("aten.log_softmax.int", str(dtype))
    assert found == cuda
    if kind is KeywordDtype:
        assert ours(traced(model, Batch((), kwargs), "half", form)) == half


def dtypes(found: TracedModel) -> dict[str, str]:
    return {site.id: str(site.dtype).removeprefix("torch.") for site in found.sites}


def test_a_disabled_region_is_respected_and_named() -> None:
    found = traced(Author().eval(), Batch((torch.randn(4, 8),)))
    sites = {site.id: site for site in found.sites}
    assert dtypes(found)["(top)/matmul"] == "float32"
    assert sites["(top)/matmul"].decision.rule == "author/autocast-disabled"
    assert dtypes(found)["(top)/matmul#2"] == "float16"
    assert sites["(top)/matmul#2"].decision.rule == "torch-cuda/matmul"


def test_dtype_branches_and_constants_follow_the_policy() -> None:
    low = dtypes(traced(Author().eval(), Batch((torch.randn(4, 8),)), "half"))
    assert low["(top)/clamp"] == "float16"
    assert low["(top)/full_like"] == "float16"
    assert "(top)/clamp" not in dtypes(traced(Author().eval(), Batch((torch.randn(4, 8),))))


def test_an_enabled_region_of_the_author_uses_its_own_dtype() -> None:
    for policy in ("half", "torch-cuda"):
        found = dtypes(traced(AuthorAutocast().eval(), Batch((torch.randn(4, 8),)), policy))
        assert found["first/linear"] == "bfloat16"


def test_one_cast_per_tensor_and_dtype() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 10, bias=False)
            self.b.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            return self.b(self.a(x) + self.a(x) + self.b(x).sum())

    found = traced(Shared().eval(), Batch((torch.zeros(2, 3).long(),)))
    casts = [s.id for s in found.sites if s.role in (Role.INSERTED_CAST, Role.WEIGHT_CAST)]
    targets = [(n.args[0], n.args[1]) for n in found.graph.nodes if str(n.target) == "aten.to.dtype"]
    assert len(targets) == len(set(targets)) == len(casts)


def test_a_tensor_written_in_place_is_cast_again() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1.0
            first = self.a(x)
            x.add_(1.0)
            return first + self.a(x)

    found = traced(InPlace().eval(), Batch((torch.randn(2, 8),)))
    casts = [n.args[0].name for n in found.graph.nodes if str(n.target) == "aten.to.dtype"]
    assert [name for name in casts if not name.startswith("p_")] == ["mul", "add_"]


def test_integers_and_bools_are_never_cast_and_float64_as_half_does() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.register_buffer("wide", torch.ones(8, dtype=torch.float64))
            self.register_buffer("count", torch.tensor(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            keep = self.a(x) > 0
            wide = torch.matmul(self.wide, self.wide)
            return keep, wide, self.count + 1

    for policy, expected in {"torch-cuda": torch.float64, "half": Mixed().half().wide.dtype}.items():
        found = traced(Mixed().eval(), Batch((torch.randn(2, 8),)), policy)
        wide = next(s for s in found.sites if s.op == "aten.matmul.default")
        assert wide.dtype is expected
        stored = {p.name: p.dtype for p in found.placeholders}
        assert stored["wide"] is expected
        assert stored["count"] is torch.int64


def test_flags_and_hooks_of_torch_are_restored() -> None:
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    before = ProxyTorchDispatchMode.__torch_dispatch__
    traced(Author().eval(), Batch((torch.randn(4, 8),)))
    with pytest.raises(TraceFailed):
        traced(Branching().eval(), Batch((torch.randn(4, 8),)))
    assert ProxyTorchDispatchMode.__torch_dispatch__ is before
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cuda")
    assert torch.is_autocast_cache_enabled()


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x


def test_a_data_dependent_branch_names_the_line_and_the_remedy() -> None:
    with pytest.raises(TraceFailed, match=r"test_trace\.py:\d+: .*if x\.sum\(\) > 0") as caught:
        traced(Branching().eval(), Batch((torch.randn(4, 8),)))
    assert "torch.where or torch.cond" in caught.value.hint


def test_inputs_that_do_not_fit_name_the_line() -> None:
    with pytest.raises(SourceError, match=r"test_trace\.py:\d+: the model itself fails.*self\.first\(x\)"):
        traced(Author().eval(), Batch((torch.randn(4, 9),)))


def test_keep_in_fp32_modules_can_be_respected() -> None:
    zoo = ZOO["t5"]()
    rules = load_policy("half").file
    respect = RuleSet(
        rules.model_copy(
            update={"weights": rules.weights.model_copy(update={"keep_fp32_modules": "respect"})}
        )
    )
    kept = traced(zoo.model.eval(), Batch((), zoo.kwargs), respect)
    stored = {p.name: p.dtype for p in kept.placeholders}
    assert stored["encoder.block.0.layer.1.DenseReluDense.wo.weight"] is torch.float32
    assert "kept in FP32" in kept.notes[0]
    plain = traced(zoo.model.eval(), Batch((), zoo.kwargs), "half")
    stored = {p.name: p.dtype for p in plain.placeholders}
    assert stored["encoder.block.0.layer.1.DenseReluDense.wo.weight"] is torch.float16
    assert "cast all the same" in plain.notes[0]


class Distance(nn.Module):
    """Calls norms whose arguments are left at their defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return nn.functional.pairwise_distance(y, 2 * y) + torch.ops.aten.norm.Scalar(y)


def test_a_norm_with_default_arguments_is_in_float32() -> None:
    found = traced(Distance().eval(), Batch((torch.randn(4, 8),)))
    dtypes = {site.op: site.dtype for site in found.sites if "norm" in site.op}
    overloads = ("ScalarOpt_dim_dtype", "ScalarOpt_dtype")
    assert dtypes == {f"aten.norm.{overload}": torch.float32 for overload in overloads}


class Chain(nn.Module):
    """Slices its layers, and compares them by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[1:]:
            x = layer(x)
        for layer, scale in zip(self.layers[:2], self.scales[:], strict=True):
            x = layer(x) * scale if layer is self.layers[0] else layer(x)
        return x


class WithAlias(nn.Module):
    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.chain = self.alias = chain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chain(x)


def test_a_second_name_of_a_module_changes_neither_ops_nor_layers() -> None:
    chain, batch = Chain().eval(), Batch((torch.randn(4, 8),))

    def ops(model: nn.Module) -> list[tuple[str, str]]:
        sites = traced(model.eval(), batch).sites
        return [(site.layer, site.op) for site in sites if site.role is Role.COMPUTE]

    layers = [f"layers.{i}" for i in (1, 2, 0, 1)]
    assert [layer for layer, op in ops(chain) if "linear" in op] == layers
    assert [op for _, op in ops(chain) if "linear" not in op] == ["aten.mul.Tensor"]
    renamed = [(layer.removeprefix("chain").lstrip("."), op) for layer, op in ops(WithAlias(chain))]
    assert renamed == ops(chain)


class Referring(nn.Module):
    """Reads its parameters from a list, an object and a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.weights = [self.layer.weight]
        self.add = functools.partial(torch.add, self.layer.bias)
        scale = self.scale
        self.scaled = lambda x: x * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.add(nn.functional.linear(x, self.weights[0])))


@pytest.mark.parametrize("policy", ["half", "torch-cuda"])
def test_parameters_keep_their_names_however_code_refers_to_them(policy: str) -> None:
    model = Referring().eval()
    found = traced(model, Batch((torch.randn(4, 8),)), policy)
    read = {node.name for node in found.graph.find_nodes(op="placeholder") if node.users}
    names = {
        p.name: found.tensors[p.node] for p in found.placeholders if p.node in read & found.tensors.keys()
    }
    expected = {name: id(parameter) for name, parameter in model.named_parameters()}
    assert {name: id(tensor) for name, tensor in names.items()} == expected
