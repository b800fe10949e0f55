"""Rules find every bad example, and nothing in good examples."""

from __future__ import annotations

import re

import pytest

from tests.linter.examples import BAD, CORRECT, GOOD, PAGES, TWINS, codes, lint, training_loop


def test_there_are_twins_for_every_code() -> None:
    assert len(PAGES) >= 30
    twins = {name.split()[0] for name in TWINS}
    without_twin, without_page = sorted(set(PAGES) - twins), sorted(twins - set(PAGES))
    assert not without_twin, f"add a pair for each of {without_twin} to tests/linter/twins.py"
    assert not without_page, f"write a page in findings/pages/ for each of {without_page}"


@pytest.mark.parametrize("name", BAD)
def test_a_bad_twin_is_found_and_nothing_else(name: str) -> None:
    code = name.split()[0]
    findings = lint(BAD[name]).findings
    said = {finding.code for finding in findings}
    assert said == {code}, f"the bad script must give {code} alone, not {sorted(said) or 'nothing'}"
    assert findings[0].severity == PAGES[code].severity
    lines = BAD[name].split("\n")
    for finding in findings:
        assert finding.source == lines[finding.line - 1]
        assert 1 <= finding.column <= len(finding.source) + 1


@pytest.mark.parametrize("name", GOOD)
def test_a_good_twin_is_silent(name: str) -> None:
    assert codes(GOOD[name]) == []


def test_the_corpus_is_large_and_in_many_styles() -> None:
    assert len(CORRECT) >= 60
    texts = "\n".join(script.source for script in CORRECT)
    for style in (
        "accelerate",
        "lightning",
        "deepspeed",
        "timm",
        "nn.parallel",
        "ignite",
        "GPT",
        "AMPTrainer",
    ):
        assert style in texts


SCALER = r"((?:\w+\.)?_?\w*scaler\w*)"
# what a slip changes, and what must then be said; the least share of the files where it must be
SLIPS = {
    "AMP802": (rf"{SCALER}\.scale\((\w[\w.]*)\)\.backward\(", r"\2.backward(", 0.85),
    "AMP803": (rf"{SCALER}\.step\(([\w.]+)\)", r"\2.step()", 0.85),
    "AMP804": (rf"^(\s*){SCALER}\.update\(\)$", r"\1pass", 0.9),
    "AMP807|AMP808": (rf"^(\s*){SCALER}\.unscale_\(.*\)(.*)$", r"\1pass", 0.8),
    "AMP809": (rf"^(\s*){SCALER}\.unscale_\((.*)\)$", r"\1\2.unscale_(\3)\n\1\2.unscale_(\3)", 0.95),
    "AMP817": (rf"^(\s*){SCALER}\.step\(([\w.]+)\)$", r"\1\2.step(\3)\n\1\3.step()", 0.9),
}


@pytest.mark.parametrize("wanted", SLIPS)
def test_a_slip_in_a_correct_loop_is_found(wanted: str) -> None:
    """Not all: where a helper of another file may do anything, silence is right."""
    pattern, replacement, share = SLIPS[wanted]
    found, missed = [], []
    for script in CORRECT:
        slipped = re.sub(pattern, replacement, script.source, flags=re.MULTILINE)
        if slipped != script.source:
            (found if set(wanted.split("|")) & set(codes(slipped)) else missed).append(script.name)
    assert len(found) + len(missed) > 20
    assert len(found) >= share * (len(found) + len(missed)), missed


def test_a_checkpoint_in_bfloat16_lacks_no_scaler() -> None:
    text = BAD["AMP820"]
    assert set(codes(text)) == {"AMP820"}
    in_bfloat16 = text.replace("torch.float16", "torch.bfloat16")
    assert in_bfloat16 != text
    assert set(codes(in_bfloat16)) == {"AMP818"}


def test_a_step_without_its_loop_is_only_likely_to_lack_an_update() -> None:
    text = GOOD["AMP804"].replace("scaler.update()", "pass")
    in_loop, alone = lint(text).findings, lint(text.replace("for x, y in loader:", "if True:")).findings
    assert [(f.code, f.severity) for f in in_loop] == [("AMP804", "error")]
    assert [(f.code, f.severity, f.fixable) for f in alone] == [("AMP804", "warning", False)]


def test_a_number_by_its_name() -> None:
    text = (
        "import torch\n\nLOW = -1e9\n\n\ndef f(x, w, mask):\n"
        '    with torch.autocast("cuda", dtype=torch.float16):\n'
        "        scores = x @ w\n        return scores.masked_fill(mask, LOW)\n"
    )
    assert codes(text) == ["AMP860"]
    assert (
        "scores.masked_fill(mask, torch.finfo(scores.dtype).min)" in lint(text, fix=True, unsafe=True).after
    )
    assert codes(text.replace("LOW = -1e9", "LOW = 1e9").replace(", LOW)", ", -LOW)")) == ["AMP860"]
    assert codes(text.replace("def f(", "LOW = -1e4\n\n\ndef f(")) == []
    assert codes(text.replace("mask):", "mask, LOW):")) == []


STEP = "scaler.scale(loss).backward()\n{}\nscaler.step(optimizer)\nscaler.update()"


@pytest.mark.parametrize(
    "text",
    [
        # a factor commutes with the scale
        training_loop(
            STEP.format("for p in model.parameters():\n    p.grad.data.mul_(0.5)\n    p.grad = p.grad / 2")
        ),
        # a switch that may be off, and here is
        BAD["AMP844"]
        .replace("dtype=torch.float16", "enabled=fp16")
        .replace("optimizer)", "optimizer, fp16=False)"),
        # torch switches float32 autocast off
        BAD["AMP869"].replace("torch.bfloat16", "torch.float32"),
        # each call of the function is another run
        GOOD["AMP802"]
        .replace("optimizer, criterion", "criterion")
        .replace("    scaler =", "    optimizer = make_optimizer(model)\n    scaler =")
        + "\nfor seed in range(3):\n    train(make_model(seed), [], None)\n",
        # two numbers make a float32 tensor
        "import torch\n\n\ndef bias(mask):\n    return torch.where(mask, 0.0, -1e9)\n",
        # what it does in float16 is said beside it
        "import torch\n\n\ndef f(x, mask):\n    if x.dtype != torch.float16:\n        x = x - mask * 1e30\n"
        "    return x\n",
        # it casts by itself
        BAD["AMP850"].replace("return x @ w", "return x.float() @ w.float()"),
        # applied outside of autocast
        BAD["AMP850"].replace("return Product.apply(x, w)", "return x @ w") + "\n\nProduct.apply(1, 2)\n",
        # a condition on a parameter is the caller's condition
        training_loop(
            "def both(s=None):\n    if s is not None:\n        s.scale(loss).backward()\n    else:\n"
            "        loss.backward()\n\n\nboth(s=amp_scaler)\nif amp_scaler is not None:\n"
            "    amp_scaler.step(optimizer)\n"
            "    amp_scaler.update()\nelse:\n    optimizer.step()",
            ", amp_scaler=None",
        ),
        # somebody else holds the same scaler
        BAD["AMP804 again"].replace(
            "self.grad_scaler.step(self.opt)",
            "self.grad_scaler.step(self.opt)\n" + " " * 16 + "self.owner.grad_scaler.update()",
        ),
    ],
)
def test_what_published_code_does_rightly_is_left_alone(text: str) -> None:
    """Each of these was an alarm in somebody's package, and wrong."""
    assert codes(text) == []


def test_an_update_in_a_conditional_expression_is_read() -> None:
    body = (
        "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\nscaler.step(optimizer)\n"
        "scaler.update() if torch.isfinite(loss) else None"
    )
    assert codes(training_loop(body)) == []
