"""Documents of ``tune``, and rankings of roundings, as no run has made them."""

from __future__ import annotations

from dataclasses import replace

from ampaudit.core.sites import SourceLine
from ampaudit.findings.finding import Source
from ampaudit.instruments.sensitivity import Sensitivity
from ampaudit.report.model import GIVEN, Environment, ModelInfo, ToolInfo
from ampaudit.report.tuning import FrontierPoint, KeptOp, KeptWeight, Noise, TriedSet, TuningReport

ADD = Source("examples/model.py", 31, "return x + self.wo(hidden)")
LIBRARY = Source(
    "lib/site-packages/torch/nn/modules/normalization.py",
    229,
    "return F.layer_norm(",
    SourceLine("examples/model.py", 44, "x = self.norm(x)  # the last one"),
)
NOISE = (
    Noise("layers.2/add", "op", 51.2, 0.21, "layers.2", "aten.add.Tensor", ADD),
    Noise("embedding.weight", "weight", 53.9, 0.112),
    Noise("head/linear", "op", 55.0, 0.08, "head", "aten.linear.default", LIBRARY),
    Noise("layers.1/add", "cast", 61.25, 0.0213, "layers.1", "aten.add.Tensor", ADD),
    Noise("layers.0/relu", "op", None, 0.0, "layers.0", "aten.relu.default"),
)
SENSITIVITY = Sensitivity("float16", NOISE, 44.2, 44.0, 3)


def _rules(*sites: str) -> str:
    head = "name: tuned\nextends: [16-bit]\nrules:\n"
    return head + "".join(f"  - id: keep-{i}\n    match: {{site: {s}}}\n" for i, s in enumerate(sites))


def _point(
    ops: int, predicted: float | None, measured: float | None, *, chosen: bool = False
) -> FrontierPoint:
    sites = [f"layers.{i}/add" for i in range(ops)]
    return FrontierPoint(ops, ops / 183, 2 * ops, 1.5e-6 * ops, predicted, measured, _rules(*sites), chosen)


def tuned() -> TuningReport:
    """An accuracy that is reached, by stacked layers, an op out of range and one that decides."""
    kept = [
        KeptOp(
            f"layers.{i}/add",
            f"layers.{i}",
            "aten.add.Tensor",
            "accuracy",
            f"makes {9 - i} % of the error",
            w,
            m,
            ADD,
        )
        for i, (w, m) in enumerate(((49.7, 49.5), (49.25, 49.1), (48.9, 49.0), (49.8, None)))
    ]
    kept.append(
        KeptOp(
            *(
                "norm/layer_norm",
                "norm",
                "aten.layer_norm.default",
                "range",
                "its peak 81,200 exceeds 65,504",
            ),
            source=LIBRARY,
        )
    )
    kept.append(KeptOp("gate/topk", "gate", "aten.topk.default", "decision", "2 of 96 choices flip", 50.9))
    return TuningReport(
        schema=1,
        tool=ToolInfo("ampaudit", "0.1.0"),
        model=ModelInfo("examples/model.py", "python", "00"),
        device="cpu",
        dtype="float16",
        target_db=50.0,
        metric_drop=None,
        metric=None,
        cost_kind="time",
        reached=True,
        low_db=44.0,
        low_broken=False,
        low_predicted_db=44.2,
        predicted_db=52.4,
        measured_db=52.1,
        ops=183,
        kept=tuple(kept),
        lower_bound=5,
        minimal=False,
        casts=12,
        weights=(
            KeptWeight("layers.0.scale", 2_000, "accuracy", 49.9),
            KeptWeight("layers.1.scale", 2_000, "accuracy", 49.6),
            KeptWeight("embedding.weight", 1_200_000, "range"),
        ),
        bytes_before=120_000_000,
        bytes_after=61_204_000,
        noise=NOISE,
        frontier=(
            _point(1, 44.3, 44.1),
            _point(3, 48.0, 47.6),
            _point(6, 52.4, 52.1, chosen=True),
            *(_point(n, 52.4 + n / 6, 75.5 if n == 120 else None) for n in range(12, 181, 12)),
            _point(183, None, None),
        ),
        tried=(
            TriedSet("start", "everything in 16 bits", 1, 44.2, 44.0, broken=False, reached=False),
            TriedSet("solve", "50 dB predicted", 5, 50.2, 49.6, broken=False, reached=False),
            TriedSet("final", "the choice", 6, 52.4, 52.1, broken=False, reached=True),
            TriedSet("exhaustive", "without layers.0/add", 5, 49.7, 49.5, broken=False, reached=False),
            TriedSet("exhaustive", "without norm/layer_norm", 5, 52.0, None, broken=True, reached=False),
        ),
        runs=9,
        policy=_rules(*(op.site for op in kept)),
        name="tuned",
        rescale="the residual stream by 2^-3: embedding, 4 projections, their biases;\neps of norm by 2^-6",
        seconds={"trace": 1.24, "measure": 2.5, "solve": 0.04},
        notes=("the head shares its weight with the embedding",),
        environment=Environment("3.11", "2.13"),
        inputs=GIVEN,
    )


def tuned_short() -> TuningReport:
    """An accuracy that nothing reaches, of a model whose outputs break in 16 bits."""
    whole = tuned()
    return replace(
        whole,
        target_db=120.0,
        dtype="bfloat16",
        cost_kind="ops",
        reached=False,
        low_db=None,
        low_broken=True,
        low_predicted_db=39.0,
        predicted_db=101.0,
        measured_db=92.25,
        kept=whole.kept[:2],
        lower_bound=0,
        weights=(),
        frontier=tuple(replace(point, chosen=False) for point in whole.frontier[:2]),
        tried=whole.tried[:2],
        noise=(),
        rescale="",
        notes=(),
    )


def hostile(text: str) -> TuningReport:
    """A document whose every free text is this one."""
    whole = tuned()
    source = Source(text, 1, text)
    return replace(
        whole,
        model=replace(whole.model, source=text),
        device=text,
        dtype=text,
        kept=tuple(replace(k, site=text, layer=text, op=text, text=text, source=source) for k in whole.kept),
        weights=tuple(replace(weight, name=text) for weight in whole.weights),
        noise=tuple(replace(n, name=text, op=text, layer=text, source=source) for n in whole.noise),
        frontier=tuple(replace(point, policy=text) for point in whole.frontier),
        tried=tuple(replace(tried, what=text) for tried in whole.tried),
        policy=text,
        name=text,
        rescale=text,
        seconds={text: 1.0},
        notes=(text,),
    )
