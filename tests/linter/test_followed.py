"""What the flow follows: items of dicts, tests for a scaler, copies of models, unknown helpers."""

from __future__ import annotations

import pytest

from ampaudit.report.finding import Severity
from tests.linter.examples import lint

HEAD = "import copy\nimport torch\nimport torch.nn.functional as F\nfrom helpers import clip_gradients\n\n\n"
TRAIN = """
def train(model, loader, path, amp=True):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    {before}
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        {clip}
        {step}
        scaler.update()
    {after}
"""
STEP = "scaler.step(optimizer)"
SAVED = [
    "state = {'epoch': 3}",
    "state['model'] = model.state_dict()",
    "if amp:",
    "    state['optimizer'] = optimizer.state_dict()",
    "torch.save(state, path)",
]


def loop(*, before: str = "", clip: str = "", step: str = STEP, after: list[str] | None = None) -> str:
    text = TRAIN.format(before=before, clip=clip, step=step, after="\n    ".join(after or ["pass"]))
    return HEAD + text


def found(text: str) -> dict[str, Severity]:
    linted = lint(text)
    assert not linted.unread
    return {f.code: f.severity for f in linted.findings if f.severity != Severity.NOTE}


def test_what_an_unknown_helper_clips_is_likely_still_scaled() -> None:
    assert found(loop(clip="clip_gradients(model, 1.0)")) == {"AMP807": Severity.WARNING}
    assert found(loop(clip="clip_gradients(model.parameters(), 1.0)")) == {"AMP807": Severity.WARNING}


@pytest.mark.parametrize(
    "clip",
    [
        "clip_gradients(model, scaler, 1.0)",
        "clip_gradients(optimizer, 1.0)",
        "clip_gradients(1.0)",
        "scaler.unscale_(optimizer); clip_gradients(model, 1.0)",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())",
    ],
)
def test_clipping_that_may_be_right_is_left_alone(clip: str) -> None:
    assert found(loop(clip=clip)) == {}


def test_items_that_are_set_later_are_part_of_a_checkpoint() -> None:
    assert found(loop(after=SAVED)) == {"AMP820": Severity.WARNING}
    with_scaler = [*SAVED[:-1], "state['scaler'] = scaler.state_dict()", SAVED[-1]]
    assert found(loop(after=with_scaler)) == {}
    assert found(loop(after=[SAVED[0], SAVED[1], SAVED[-1]])) == {}


def test_an_optimizer_is_known_by_its_key() -> None:
    before = "both = {'a': optimizer, 'b': optimizer}"
    again = "scaler.step(both['a']); scaler.step(both['b'])"
    assert found(loop(before=before, step=again)) == {"AMP824": Severity.ERROR}
    other = "both = {'a': optimizer, 'b': torch.optim.SGD(other.parameters(), lr=1.0)}"
    assert "AMP824" not in found(loop(before=other, step=again))
    changed = before + "; both['b'] = make()"
    assert "AMP824" not in found(loop(before=changed, step=again))


def test_a_test_for_a_scaler_is_decided_where_it_is_there() -> None:
    always = "if scaler is not None: scaler.step(optimizer)\n        else: optimizer.step()"
    assert found(loop(step=always)) == {}
    unscaled = "if scaler is None: scaler.step(optimizer)\n        else: optimizer.step()"
    assert found(loop(step=unscaled)) == {"AMP803": Severity.ERROR}


def test_gradients_that_are_replaced_may_have_any_scale() -> None:
    clip = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    replaced = "for p in model.parameters(): p.grad = merged(p)"
    assert found(loop(clip=clip)) == {"AMP807": Severity.ERROR}
    assert found(loop(clip=f"{replaced}\n        {clip}")) == {}


def test_a_copy_of_a_model_is_another_model() -> None:
    text = loop(after=["half = model.half()", "scaler.step(optimizer)"])
    copied = loop(after=["half = copy.deepcopy(model).half()", "half(1)"])
    assert "AMP801" in found(text)
    assert found(copied) == {}


def test_gradients_of_a_step_for_every_batch_are_zeroed_for_every_batch() -> None:
    gated = loop().replace("for x, y in loader:", "for i, (x, y) in enumerate(loader):")
    gated = gated.replace(
        "        optimizer.zero_grad()", "        if i % 4 == 0:\n            optimizer.zero_grad()"
    )
    assert found(gated) == {"AMP839": Severity.ERROR}
    both = gated.replace(
        f"        {STEP}", f"        if i % 4 == 3:\n            {STEP}\n            scaler.update()"
    )
    both = both.replace("        scaler.update()\n    pass", "    pass")
    assert "AMP839" not in found(both)
    by_hand = gated.replace(
        f"        {STEP}", f"        {STEP}\n        for p in model.parameters(): p.grad = None"
    )
    assert found(by_hand) == {}


def test_a_loss_needs_the_scaler_that_steps() -> None:
    second = "other = torch.amp.GradScaler('cuda')"
    assert found(loop(before=second, step="other.step(optimizer)")).get("AMP815") == Severity.ERROR
