"""The linter against torch itself: what it says must happen when a script is run, and silence be deserved.

Nothing here is used by the linter, which only reads. Scripts run on the CPU, whose scaler is CUDA's.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ampaudit.findings.pages import all_pages
from ampaudit.linter.flow.torch_names import ADAM_LIKE, FLOAT16_ROUNDS_TO_ZERO, WITHOUT_HALF_KERNEL
from ampaudit.linter.linting import lint_text
from ampaudit.linter.selection import RuleSelection
from tests.linter.examples import BAD, training_loop

SCALE = 1024.0
# each statement of a loop, and what a loop without a scaler would do there
STATEMENTS = {
    "scaled": "scaler.scale(loss_of(model, x)).backward()",
    "plain": "loss_of(model, x).backward()",
    "unscale": "scaler.unscale_(optimizer)",
    "clip": "torch.nn.utils.clip_grad_norm_(model.parameters(), 50.0)",
    "step": "scaler.step(optimizer)",
    "bare": "optimizer.step()",
    "update": "scaler.update()",
    "zero": "optimizer.zero_grad()",
}
RESCALE = {"rescale": "scaler.update(512.0)"}  # needs no step before it
WITHOUT = {"scaled": "plain", "step": "bare", "unscale": None, "update": None, "rescale": None}
HEAD = "import torch\n\n\ndef train(model, optimizer, data, loss_of):\n"


def source(names: list[str], *, scaler: bool = True) -> str:
    """A training function with these statements in its loop."""
    made = (
        f'    scaler = torch.amp.GradScaler("cpu", init_scale={SCALE}, growth_interval=1)\n' if scaler else ""
    )
    body = "".join(f"        {(STATEMENTS | RESCALE)[name]}\n" for name in names) or "        pass\n"
    return f"{HEAD}{made}    for x in data:\n{body}"


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def weights_after(text: str) -> torch.Tensor | str:
    """The weights after two rounds of the loop, or how it failed."""
    namespace: dict[str, Any] = {}
    exec(compile(text, "script", "exec"), namespace)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = [torch.randn(2, 4), torch.randn(2, 4)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            namespace["train"](model, optimizer, data, loss_of)
    except (RuntimeError, AssertionError, ValueError) as error:
        return str(error)
    return model.weight.detach().clone()


def meant(names: list[str]) -> list[str]:
    """The same loop in float32: no scale, nothing to take out."""
    plain = [WITHOUT.get(name, name) for name in names]
    return [name for name in plain if name is not None]


def codes(text: str) -> set[str]:
    return {finding.code for finding in lint_text(text, "script.py", RuleSelection()).findings}


def is_sane(names: list[str]) -> bool:
    """Whether the loop makes sense in float32: zero, backward, perhaps clip, step, beginning anywhere."""
    letters = "".join({"zero": "z", "plain": "p", "clip": "c", "bare": "b"}[name] for name in meant(names))
    if letters.count("z") != 1:
        return False
    at = letters.index("z")
    return re.fullmatch("zp+c?b", letters[at:] + letters[:at]) is not None


def same_as_meant(names: list[str]) -> bool:
    found, wanted = weights_after(source(names)), weights_after(source(meant(names), scaler=False))
    return (
        isinstance(found, torch.Tensor) and isinstance(wanted, torch.Tensor) and torch.allclose(found, wanted)
    )


RIGHT = (
    "zero scaled unscale clip step update",
    "zero scaled step update",
    "scaled step update zero",
    "zero scaled scaled unscale clip step update",
    "scaled unscale clip step update zero",
)


def edits(names: list[str]) -> set[tuple[str, ...]]:
    """The loop itself and all that are a slip away: a line missing, doubled, swapped, replaced, added."""
    found = {tuple(names)}
    for i in range(len(names)):
        found.add((*names[:i], *names[i + 1 :]))
        for other in STATEMENTS:
            found.add((*names[:i], other, *names[i + 1 :]))
        for j in range(i + 1, len(names)):
            swapped = list(names)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            found.add(tuple(swapped))
    for i in range(len(names) + 1):
        for other in STATEMENTS:
            found.add((*names[:i], other, *names[i:]))
    return found


def judged(names: list[str]) -> None:
    """Hold the linter against what really happens."""
    found = codes(source(names))
    if not same_as_meant(names):
        assert found, f"{names} goes wrong, and nothing was said: {weights_after(source(names))}"
    elif "bare" in names and "unscale" in names:
        assert found <= {"AMP803"}, names  # right until a step overflows: see the next test
    else:
        # taking the scale out of gradients that are zeroed next is senseless, and harmless
        assert found <= ({"AMP809"} if "update unscale" in " ".join(names * 2) else set()), names


@pytest.mark.parametrize("right", RIGHT)
def test_every_loop_that_is_one_slip_away(right: str) -> None:
    slips = sorted(edits(right.split()))
    uses = {"scaled", "step", "unscale", "update"}
    judgeable = [list(names) for names in slips if is_sane(list(names)) and uses & set(names)]
    assert len(judgeable) >= 20
    for names in judgeable:
        judged(names)


@pytest.mark.parametrize(
    "names",
    [
        "scaled step zero plain update",  # the plain loss is not divided later
        "zero scaled unscale update scaled step update",  # unscaled gradients are left when the next come
        "scaled update unscale plain clip step update zero",
        "step zero update scaled",
    ],
)
def test_loops_that_went_unseen_once(names: str) -> None:
    assert not same_as_meant(names.split())
    judged(names.split())


@pytest.mark.parametrize(
    "names",
    [
        *(right.replace("update", "rescale") for right in RIGHT),
        "zero scaled step rescale zero scaled step update",
        "zero scaled step update rescale",
        "zero scaled rescale step update",  # by another scale
        "rescale zero scaled step update",  # raises: there is no scale yet
    ],
)
def test_a_new_scale_ends_a_step_as_an_update_does(names: str) -> None:
    assert same_as_meant(names.split()) == ("rescale step" not in names and not names.startswith("rescale"))
    judged(names.split())


def test_a_bare_step_after_unscale_is_not_skipped_when_it_overflows() -> None:
    text = source(["zero", "scaled", "unscale", "bare", "update"])
    assert codes(text) == {"AMP803"}
    infinite = text.replace("loss_of(model, x)", "(loss_of(model, x) * float('inf'))")
    after = weights_after(infinite)
    assert isinstance(after, torch.Tensor)
    assert not after.isfinite().all()
    skipping = weights_after(infinite.replace("optimizer.step()", "scaler.step(optimizer)"))
    assert isinstance(skipping, torch.Tensor)
    assert skipping.isfinite().all()


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(RIGHT), st.data())
def test_loops_that_are_two_slips_away(right: str, data: st.DataObject) -> None:
    first = data.draw(st.sampled_from(sorted(edits(right.split()))))
    names = list(data.draw(st.sampled_from(sorted(edits(list(first))))))
    if is_sane(names) and {"scaled", "step", "unscale", "update"} & set(names):
        judged(names)


def outcome_of(text: str, **known: Any) -> str:
    """How a script fails when its function runs on the CPU; empty if it does not fail."""
    text = text.replace('"cuda"', '"cpu"').replace(".cuda()", "")
    text = text.replace("from torchvision.models import resnet18", "resnet18 = lambda: torch.nn.Linear(4, 4)")
    namespace: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(text, "train.py", "exec"), namespace)
    model = torch.nn.Linear(4, 4)
    loader = [(torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 4))[: known.pop("parts", 2)]] * 3
    ready = {"model": model, "loader": loader, "criterion": torch.nn.functional.mse_loss, **known}
    if "optimizer" not in namespace:
        ready["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    train = namespace["train"]
    wanted = {
        name: ready[name]
        for name in train.__code__.co_varnames[: train.__code__.co_argcount]
        if name in ready
    }
    try:
        train(**wanted)
    except (RuntimeError, AssertionError, ValueError) as error:
        return str(error)
    return ""


BACKWARD, AT_STEP = "scaler.scale(loss).backward()\n", "scaler.step(optimizer)\n"


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        ("AMP801", BAD["AMP801"], "Attempting to unscale FP16 gradients"),
        ("AMP804", BAD["AMP804"], "step() has already been called since the last update()"),
        (
            "AMP806",
            training_loop(f"{BACKWARD}scaler.update()\n{AT_STEP}"),
            "No inf checks were recorded prior to update",
        ),
        (
            "AMP806",
            training_loop(f"{BACKWARD}{AT_STEP}scaler.update()\nscaler.update()"),
            "No inf checks were recorded prior to update",
        ),
        (
            "AMP809",
            training_loop(f"{BACKWARD}{AT_STEP}scaler.unscale_(optimizer)\nscaler.update()"),
            "unscale_() is being called after step()",
        ),
        (
            "AMP809",
            training_loop(f"scaler.unscale_(optimizer)\n{BACKWARD}{AT_STEP}scaler.update()"),
            "unscale_",
        ),
    ],
)
def test_what_a_page_says_is_raised_is_raised(code: str, text: str, said: str) -> None:
    assert code in codes(text)
    assert said in outcome_of(text)
    page = all_pages()[code].text
    assert said.removesuffix("()") in " ".join(page.split())


@contextlib.contextmanager
def fake_cuda_autocast() -> Iterator[None]:
    """CUDA's autocast for tensors without data: the real dispatcher, and no device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.AutocastCUDA):
        before = torch.get_autocast_dtype("cuda")  # somebody may have set another one
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.float16)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", before)


def test_autocast_undoes_a_float_and_linalg_has_no_half() -> None:
    with fake_cuda_autocast():
        product = torch.empty(2, 2, device="cuda").float() @ torch.empty(2, 2, device="cuda").float()
        assert product.dtype is torch.float16  # so that angles are rounded (AMP869)
        with pytest.raises(RuntimeError, match=r"Low precision dtypes"):
            torch.linalg.inv(product)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.linalg.inv(torch.eye(2) @ torch.eye(2)).dtype is torch.float32
    cpu = all_pages()["AMP846"].bad.code.replace('"cuda", dtype=torch.float16', '"cpu"')
    assert not codes(cpu)


@pytest.mark.parametrize("path", sorted(WITHOUT_HALF_KERNEL))
def test_what_has_no_16_bit_kernel_raises(path: str) -> None:
    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)
    square = torch.eye(2, dtype=torch.float16)
    second = (square,) if path.endswith(("solve", "lstsq")) else ()
    with pytest.raises(RuntimeError), warnings.catch_warnings(action="ignore"):
        function(square, *second)


@pytest.mark.parametrize("value", [-1e9, -65505.0 - 16, 1e6])
def test_a_mask_beyond_float16_raises_or_is_infinite(value: float) -> None:
    scores = torch.zeros(2, dtype=torch.float16)
    mask = torch.tensor([True, False])
    with pytest.raises(RuntimeError, match="without overflow"):
        scores.masked_fill(mask, value)
    assert (mask.half() * value).isinf().any()


def test_where_a_sigmoid_in_float16_is_0_or_1() -> None:
    """The numbers on the page of AMP844."""
    at = torch.tensor([7.0, 9.0, -16.0, -18.0]).sigmoid().half()
    assert (at[0] < 1, at[1] == 1, at[2] > 0, at[3] == 0) == (True, True, True, True)


def test_eps_that_vanishes() -> None:
    assert torch.tensor(FLOAT16_ROUNDS_TO_ZERO, dtype=torch.float16) == 0  # a tie, which goes to even: zero
    assert torch.tensor(FLOAT16_ROUNDS_TO_ZERO * 1.001, dtype=torch.float16) > 0


@pytest.mark.parametrize("name", sorted(set(ADAM_LIKE) - {"SparseAdam"}))
def test_the_default_eps_of_an_optimizer_makes_nan_in_float16(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = getattr(torch.optim, name)([weight])
    assert optimizer.defaults["eps"] == ADAM_LIKE[name]
    for _ in range(10):  # RAdam uses eps only after some steps
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert weight.isnan().any(), name


def test_bce_is_refused_under_autocast_on_cuda() -> None:
    with fake_cuda_autocast():
        probabilities = torch.empty(2, device="cuda", dtype=torch.float16)
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            torch.nn.functional.binary_cross_entropy(probabilities, probabilities)


def test_data_parallel_hands_on_the_switch_and_not_the_dtype() -> None:
    """AMP851: the state of a new thread, as DataParallel's threads set it up."""
    import inspect
    import threading

    from torch.nn.parallel import parallel_apply

    seen: list[torch.dtype] = []
    with torch.autocast("cpu", dtype=torch.float16):
        thread = threading.Thread(target=lambda: seen.append(torch.get_autocast_dtype("cpu")))
        thread.start()
        thread.join()
    assert seen == [torch.bfloat16]  # this thread's float16 was not taken over
    written = inspect.getsource(parallel_apply)
    assert "autocast(device_type, enabled=autocast_enabled)" in written or "dtype" not in written


def test_an_average_in_16_bits_stands_still() -> None:
    """What AMP867 says: changes of less than 1/2048, or in bfloat16 1/256, of a weight are rounded away."""
    for dtype, smallest in ((torch.float16, 1 / 2048), (torch.bfloat16, 1 / 256)):
        one = torch.ones(1, dtype=dtype)
        assert [bool(one + change * smallest != one) for change in (0.99, 1.01)] == [False, True]
    weight = torch.full((4,), 1.25)
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    averages = {dtype: torch.ones(4, dtype=dtype) for dtype in dtypes}
    for average in averages.values():
        for _ in range(20_000):
            average.mul_(0.999).add_(weight.to(average.dtype), alpha=0.001)
    assert averages[torch.float32].equal(averages[torch.float32].clamp(1.2499, 1.2501))
    assert all(averages[dtype].equal(torch.ones(4, dtype=dtype)) for dtype in dtypes[:2])


def test_exp_of_more_than_11_overflows_in_float16() -> None:
    """What AMP868 says."""
    values = torch.tensor([11.0, 11.1])
    assert values.half().exp().isfinite().tolist() == [True, False]
    assert values.exp().isfinite().all()
