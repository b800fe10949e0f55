"""Statistics against brute force in exact or double arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ampaudit.core.formats import FLOAT16, WHAT_IF_FORMATS, NumberFormat
from ampaudit.run import measure as measure_module
from ampaudit.run.backends import rounded
from ampaudit.run.measure import FIELDS, Samples, flat_pair, measure_any, measure_cpu, sample

FLOATS = hnp.arrays(
    np.float32,
    st.integers(1, 40),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 1.0, -65520.0]),
)


def brute_force(reference: np.ndarray, value: np.ndarray) -> dict[str, float]:
    fields = dict.fromkeys(FIELDS, 0.0)
    for r, v in zip(reference.tolist(), value.tolist(), strict=True):
        fields["ref_bad"] += not math.isfinite(r)
        if math.isfinite(r):
            fields["ref_peak"] = max(fields["ref_peak"], abs(r))
            fields["pos_inf"] += v == math.inf
            fields["neg_inf"] += v == -math.inf
            if not math.isfinite(v):
                fields["bad_ref_peak"] = max(fields["bad_ref_peak"], abs(r))
        if math.isfinite(v):
            fields["peak"] = max(fields["peak"], abs(v))
        fields["nan"] += math.isnan(v) and not math.isnan(r)
        if math.isfinite(r) and math.isfinite(v):
            fields["err_sq"] += (v - r) ** 2
            fields["ref_sq"] += r**2
    return fields


def assert_fields(found: list[float], expected: dict[str, float], *, loose: bool = False) -> None:
    for name, number in zip(FIELDS, found, strict=True):
        tolerance = 1e-5 if loose and name.endswith("_sq") else 1e-12
        assert number == pytest.approx(expected[name], rel=tolerance, abs=1e-300), name


@given(FLOATS, st.data())
@settings(max_examples=300, deadline=None)
def test_both_routines_equal_brute_force(reference: np.ndarray, data: st.DataObject) -> None:
    value = data.draw(hnp.arrays(np.float32, reference.shape, elements=st.floats(width=32)))
    mixed = np.where(data.draw(hnp.arrays(np.bool_, reference.shape)), reference, value)
    expected = brute_force(reference, mixed)
    first, second = torch.from_numpy(reference), torch.from_numpy(mixed)
    assert_fields(measure_any(first, second).tolist(), expected)
    found = measure_cpu(first, second, near=0.0)
    assert_fields(found, expected, loose=True)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_element_in_any_block_is_found(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "BLOCK", 64)
    for position in (0, 63, 64, 200, 299):
        reference = torch.randn(300)
        value = reference.clone()
        value[position] = bad
        assert_fields(
            measure_cpu(reference, value, near=0.0),
            brute_force(reference.numpy(), value.numpy()),
            loose=True,
        )


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, None])
def test_sampling_errors_finds_every_bad_element(bad: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "BLOCK", 64)
    for position in (0, 63, 64, 200, 299):
        reference = torch.randn(300)
        value = reference + 0.01 * torch.randn(300)
        if bad is not None:
            value[position] = bad
        found = dict(zip(FIELDS, measure_cpu(reference, value, 1e4, error_every=4), strict=True))
        whole = brute_force(reference.numpy(), value.numpy())
        for name in ("pos_inf", "neg_inf", "nan", "bad_ref_peak"):
            assert found[name] == whole[name]
        assert found["ref_peak"] == pytest.approx(whole["ref_peak"], rel=0.02)
        # errors are over the first block of every four here, and the one with the bad element
        blocks = {0, 4} | ({position // 64} if bad is not None else set())
        chosen = np.concatenate([np.arange(b * 64, min(b * 64 + 64, 300)) for b in sorted(blocks)])
        part = brute_force(reference.numpy()[chosen], value.numpy()[chosen])
        assert found["err_sq"] == pytest.approx(part["err_sq"], rel=1e-4)
        assert found["ref_sq"] == pytest.approx(part["ref_sq"], rel=1e-4)


def test_peak_of_negative_values_and_negative_nan() -> None:
    assert measure_cpu(torch.tensor([-3.0, -7.0, 1.0]), torch.tensor([-3.0, -7.0, 1.0]))[0] == 7.0
    negative_nan = torch.tensor([-0x400000], dtype=torch.int32).view(torch.float32)
    assert negative_nan.isnan().all()
    row = dict(zip(FIELDS, measure_cpu(torch.tensor([-1.0]), negative_nan), strict=True))
    assert row["nan"] == 1


def test_sums_survive_where_float32_squares_do_not() -> None:
    huge, tiny = torch.full((4,), 3e25), torch.full((4,), 1e-25)
    row = dict(zip(FIELDS, measure_cpu(huge, huge * 1.5), strict=True))
    assert row["ref_sq"] == pytest.approx(4 * float(huge[0]) ** 2, rel=1e-6)
    row = dict(zip(FIELDS, measure_cpu(tiny, tiny * 2), strict=True))
    assert row["err_sq"] == pytest.approx(4 * float(tiny[0]) ** 2, rel=1e-6)


@given(hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32)))
@settings(max_examples=300, deadline=None)
def test_emulated_float16_is_numpy_float16(values: np.ndarray) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(np.float16).astype(np.float32)
    found = rounded(torch.from_numpy(values.copy()), torch.float16).numpy()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("form", WHAT_IF_FORMATS, ids=lambda form: form.name)
def test_formats_agree_with_torch(form: NumberFormat) -> None:
    dtype = getattr(torch, form.name)
    info = torch.finfo(dtype)
    assert form.max == info.max
    assert form.min_normal == info.smallest_normal
    assert form.eps == info.eps

    def through(x: float) -> float:
        return torch.tensor(x, dtype=torch.float32).to(dtype).double().item()

    just_below = np.nextafter(np.float32(form.overflow_at), np.float32(0)).item()
    assert through(just_below) == form.max
    if form.has_inf:
        assert through(form.overflow_at) == math.inf
    assert through(form.min_subnormal) == form.min_subnormal
    assert through(form.flush_below) == 0.0
    assert through(form.flush_below * 1.01) == form.min_subnormal


def test_headroom_of_the_schema_example() -> None:
    assert FLOAT16.headroom_bits(81920.0) == pytest.approx(-0.3226, abs=1e-4)
    assert FLOAT16.headroom_bits(65504.0) == 0
    assert FLOAT16.headroom_bits(0.0) == math.inf


@given(hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-1e5, 1e5, width=32)))
@settings(max_examples=200, deadline=None)
def test_samples_of_short_vectors_are_exact(values: np.ndarray) -> None:
    reference = torch.from_numpy(values)
    value = rounded(reference, torch.float16)
    samples = Samples(FLOAT16.min_normal)
    samples.add("site", reference, value)
    samples.flush()
    found = samples.results["site"]
    half = value.numpy()
    assert found.sampled == values.size
    assert found.flushed == int(((half == 0) & (values != 0)).sum())
    assert found.subnormal == int(((half != 0) & (np.abs(half) < 2.0**-14)).sum())
    counted = {}
    for r in values.tolist():  # also those that 16 bits make infinite
        if r != 0:
            exponent = math.frexp(r)[1] - 1
            counted[max(exponent, -150)] = counted.get(max(exponent, -150), 0) + 1
    assert found.exponents == counted
    nonzero = np.abs(half[(half != 0) & np.isfinite(half)])
    assert found.min_nonzero == (None if nonzero.size == 0 else float(nonzero.min()))


def test_long_vectors_are_sampled_from_beginning_to_end() -> None:
    vector = torch.arange(100_000, dtype=torch.float32)
    taken = sample(vector)
    assert taken.numel() == 512
    assert taken[0] == 0
    assert taken[-1] == 99_999 or taken[-1] > 99_900


def test_flat_pair_matches_elements_whatever_the_layout() -> None:
    base = torch.randn(4, 6, 5)
    for first, second in (
        (base, base.clone()),
        (base.transpose(0, 2), base.clone().transpose(0, 2)),
        (base.transpose(0, 2), base.transpose(0, 2).contiguous()),
        (base[:, ::2], base[:, ::2].clone()),
        (base[:1].expand(4, 6, 5), base[:1].expand(4, 6, 5).clone()),
    ):
        a, b = flat_pair(first, second)
        assert a.numel() == first.numel()
        assert torch.equal(a, b)
