"""Healthy architectures raise no alarm, and whatever a scan observes is inside what a proof allows."""

from __future__ import annotations

import pytest

from ampaudit import scan
from tests.support.zoo import ZOO

LEAST_PROVED = 0.6  # Mixtral's router and experts have ops without a bound


@pytest.mark.parametrize(("policy", "dtype"), [("half", "float16"), ("ampaudit", "bfloat16")])
@pytest.mark.parametrize("name", ZOO)
def test_a_healthy_architecture_is_quiet_and_inside_its_bounds(name: str, policy: str, dtype: str) -> None:
    zoo = ZOO[name]()
    report = scan(zoo.model.eval(), zoo.kwargs, policy=policy, dtype=dtype, prove=True)
    assert [(f.code, f.site) for f in report.findings if f.severity != "note"] == []
    assert report.proofs is not None
    assert report.proofs.proved >= LEAST_PROVED * report.proofs.sites
    for site in report.sites:
        if site.inside is not None:
            assert site.bound_inside is not None
            assert site.inside <= site.bound_inside
        if site.bound is not None and site.forward is not None:
            assert site.forward.peak <= site.bound * (1 + 2.0**-7) + 1e-6, site.site
