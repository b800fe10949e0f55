"""Data flow through names, objects, branches, loops, annotations and unknown code."""

from __future__ import annotations

import pytest

from tests.linter.examples import GOOD, codes, training_loop


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        # another name for the same thing
        ("s = scaler\ns.scale(loss).backward()\noptimizer.step()\ns.update()", ["AMP803"]),
        ("total = loss + 1\ntotal.backward()\nscaler.step(optimizer)\nscaler.update()", ["AMP802"]),
        # both branches do it; one does; the other may not
        (
            "if x.ndim:\n    loss.backward()\nelse:\n    loss.backward()\n"
            "scaler.step(optimizer)\nscaler.update()",
            ["AMP802", "AMP802"],
        ),
        (
            "if flag:\n    loss.backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
            "else:\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()",
            ["AMP802"],
        ),
        # a condition that is met twice is the same both times
        (
            "if flag:\n    scaler.scale(loss).backward()\nelse:\n    loss.backward()\n"
            "if flag:\n    scaler.step(optimizer)\n    scaler.update()\nelse:\n    optimizer.step()",
            [],
        ),
        (
            "if flag:\n    scaler.scale(loss).backward()\nelse:\n    loss.backward()\n"
            "if not flag:\n    scaler.step(optimizer)\n    scaler.update()\nelse:\n    optimizer.step()",
            ["AMP802", "AMP803"],
        ),
        # code that is not here may do anything with what it is given, and nothing with what it is not
        ("scaler.scale(loss).backward()\nhelp_me(scaler, optimizer)\noptimizer.step()", []),
        ("scaler.scale(loss).backward()\nlog(loss.detach())\noptimizer.step()\nscaler.update()", ["AMP803"]),
        ("my_backward(loss)\nscaler.step(optimizer)\nscaler.update()", []),
        ("scaler.scale(loss).backward()\nscaler.step(optimizer)\nfinish(scaler)", []),
        ("scaler.scale(loss).backward()\nscaler.step(optimizer)\nfinish(x)", ["AMP804"]),
        # scaled on one path only, which nobody can tell
        (
            "out = loss\nif x.sum() > 0:\n    out = scaler.scale(loss)\nout.backward()\noptimizer.step()\n"
            "scaler.update()",
            [],
        ),
        # paths that end
        (
            "if bad(x):\n    loss.backward()\n    continue\nscaler.scale(loss).backward()\n"
            "scaler.step(optimizer)\nscaler.update()",
            [],
        ),
        (
            "try:\n    loss.backward()\nexcept RuntimeError:\n    raise\n"
            "scaler.step(optimizer)\nscaler.update()",
            ["AMP802"],
        ),
        # a sum goes through the graphs of both
        (
            "a, b = model(x).sum(), model(y)\nscaler.scale(a + b.sum()).backward()\n"
            "scaler.scale(b.mean()).backward()\nscaler.step(optimizer)\nscaler.update()",
            ["AMP835"],
        ),
        # walrus, tuple, conditional expression
        ("(scaled := scaler.scale(loss)).backward()\noptimizer.step()\nscaler.update()", ["AMP803"]),
        ("a, b = loss, 1\na.backward()\nscaler.step(optimizer)\nscaler.update()", ["AMP802"]),
        (
            "out = scaler.scale(loss) if flag else loss\nout.backward()\n"
            "scaler.step(optimizer)\nscaler.update()",
            ["AMP802"],
        ),
    ],
)
def test_data_flow(body: str, wanted: list[str]) -> None:
    assert sorted(codes(training_loop(body, ", flag=True"))) == wanted


def test_a_lambda_or_an_own_context_is_not_known() -> None:
    text = GOOD["AMP842"].replace('torch.autocast("cuda", dtype=torch.float16)', "mixed_precision()")
    assert codes(text) == []


@pytest.mark.parametrize(
    "written", ["GradScaler", "'GradScaler'", "torch.amp.GradScaler | None", "Optional[GradScaler]"]
)
def test_an_annotation_says_what_a_parameter_is(written: str) -> None:
    """Nothing else would: the step and the update are somebody else's."""
    text = (
        f"import torch\n\n\ndef back(loss, optimizer, s: {written}):\n    s.scale(loss).backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    assert codes(text) == ["AMP803"]
    assert codes(text.replace(f": {written}", "")) == []
