"""Writes docs/onnx-operators.md: `python -m tests.source.onnx.page`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ampaudit.source.onnx.ops import OPERATORS
from tests.support.onnx_known_failures import KNOWN_FAILURES
from tests.support.onnx_nodes import NodeTest, node_tests
from tests.support.paths import ROOT

PLACE = ROOT / "docs" / "onnx-operators.md"
# of these, ONNX Runtime has no kernel, or they are of text, which torch has no tensors for
_REFUSED = {"ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit"}
_TEXT = """\
# ONNX operators

How `ampaudit` computes the {count} operators of `ai.onnx`. `python -m tests.source.onnx.page` writes this
page.

## As ops of torch

A node of these is one site under its own name.

{ours}.

Of `com.microsoft`: {contrib}.

`If`, `Loop` and `Scan` run along the path that the inputs take. Tensors of text are refused.

## As the function that the standard defines

All ops of the function are sites under the node's name. An operator above is also computed this way if it
has an attribute that torch's op lacks.

{standard}.

## Through ONNX Runtime

Each is one op in float32, which the report counts as not audited inside. They need the extra `onnx`
(`pip install '.[onnx]'` in a clone). Operators of other domains also run this way if ONNX Runtime has
them.

{runtime}.

## Not supported

{refused}.

## Results of the node tests of the `onnx` package

`tests/source/onnx/test_backend_nodes.py` runs the {tests:,} node tests of the package, with their own
tolerances.

| tests | pass | of |
|---|--:|--:|
| all | {passed:,} | {tests:,} |
| with floating-point numbers that torch has | {floats_passed:,} | {floats:,} |
| of these, with operators that do not need ONNX Runtime | {supported_passed:,} | {supported:,} |

The others fail for these reasons:

| reason | tests |
|---|--:|
{reasons}"""


def ours(domain: str, name: str) -> bool:
    """Whether there is a function for an operator."""
    return (domain, name) in OPERATORS or (domain, name) == ("", "Constant")


def standard(domain: str, name: str) -> bool:
    """Whether the standard gives a function for an operator."""
    import onnx

    try:
        schema = onnx.defs.get_schema(name, domain)
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def share(failures: Mapping[str, str | None]) -> dict[str, int]:
    """Return how many tests pass."""
    made: Counter[str] = Counter()
    for test in node_tests():
        kinds = ["tests"]
        if test.floats:
            kinds += ["floats", "supported"] if _is_supported(test) else ["floats"]
        for kind in kinds:
            made[kind] += 1
            made["passed" if kind == "tests" else f"{kind}_passed"] += failures[test.name] is None
    return dict(made)


def _is_supported(test: NodeTest) -> bool:
    own = {(f.domain, f.name) for f in test.proto.functions}
    return all(ours(*key) or standard(*key) or key in own for key in test.operators)


def page(failures: Mapping[str, str | None]) -> str:
    """Return the text of the page."""
    import onnx

    schemas = [s for s in onnx.defs.get_all_schemas() if s.domain == "" and not s.deprecated]
    names = sorted({schema.name for schema in schemas})
    mapped = [name for name in names if ours("", name)]
    bodies = [name for name in names if name not in mapped and standard("", name)]
    rest = [name for name in names if name not in {*mapped, *bodies, *_REFUSED}]
    reasons = Counter(KNOWN_FAILURES.values())
    return _TEXT.format(
        count=len(names),
        ours=_listed(mapped),
        contrib=_listed(sorted(_contrib())),
        standard=_listed(bodies),
        runtime=_listed(rest),
        refused=_listed(sorted(_REFUSED)),
        reasons="".join(f"| {reason} | {number} |\n" for reason, number in reasons.most_common()),
        **share(failures),
    )


def _contrib() -> list[str]:
    return [name for domain, name in OPERATORS if domain == "com.microsoft"]


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PLACE.write_text(page({test.name: test.failure() for test in node_tests()}), encoding="utf-8")
