"""Options of ``plan`` and ``scan``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import AfterValidator, BeforeValidator, InstanceOf

from ampaudit.core.assumptions import parse_assumption, parse_sweep, sweep_text
from ampaudit.core.config import (
    NOT_NAN,
    Config,
    DeviceName,
    DtypeName,
    FilePath,
    Option,
    Seed,
    Texts,
    python_only,
)
from ampaudit.core.errors import UsageError
from ampaudit.core.instruments import RUNS, Instrument, Need, instruments
from ampaudit.core.text import parse_size
from ampaudit.core.untrusted import describe
from ampaudit.findings.finding import FailOn, FailOnGaps
from ampaudit.findings.pages import codes_beginning
from ampaudit.policy import RuleSet, load_policy


def _known_codes(ignored: tuple[str, ...]) -> tuple[str, ...]:
    for text in ignored:
        if code := text.partition(":")[0]:
            codes_beginning(code)
    return ignored


Rules = str | Path | InstanceOf[RuleSet]
PolicyName = Annotated[Rules, Option("Policy name or rule file.")]
FailOnLevel = Annotated[FailOn, Option("Lowest severity that makes the exit code 1.")]
FailOnOption = Annotated[
    FailOnGaps,
    Option("Lowest severity that makes the exit code 1; 'gap' means errors and unaudited parts."),
]
TwinFile = Annotated[
    FilePath | None, Option("Python file that registers twins of custom ops.", metavar="FILE")
]
Ignored = Annotated[
    Texts,
    AfterValidator(_known_codes),
    Option("Hide findings by code or prefix and layer glob (repeatable).", metavar="CODE[:LAYER]"),
]
MinHeadroom = Annotated[float, NOT_NAN, Option("Warn below this headroom.", metavar="BITS")]
MinSqnr = Annotated[float, NOT_NAN, Ge(0), Option("Required accuracy of every output.", metavar="DB")]
MIN_HEADROOM, MIN_SQNR = 1.0, 20.0  # what scan and convert ask for by default


# two options exclude each other only if one violates a need of the other
_VIOLATES = {
    "ranges": Need.LOW_PRECISION,
    "static": Need.RUN,
    "steps": Need.ONE_STEP,
    "sweep": Need.ONE_SIZE,
    "memory": Need.WHOLE_MODEL,
    "contract": Need.DEFAULT_CONTRACT,
    **{each.name: each.violates for each in instruments() if each.violates is not None},
}
_NEEDS: Mapping[str, Collection[Need]] = {
    "static": {Need.LOW_PRECISION, Need.DEFAULT_CONTRACT},
    "assume": {Need.ONE_STEP, Need.DEFAULT_CONTRACT},
    "prove": {Need.LOW_PRECISION, Need.ONE_STEP, Need.DEFAULT_CONTRACT},
    "contract": {Need.LOW_PRECISION, Need.FORWARD_ONLY},
    "memory": {Need.RUN, Need.FORWARD_ONLY, Need.ONE_STEP},
    "sweep": RUNS,
    "steps": RUNS | {Need.FORWARD_ONLY},
    "advise": RUNS | {Need.FORWARD_ONLY},
    "diff": RUNS | {Need.FORWARD_ONLY},
    "stress": RUNS
    | {Need.FORWARD_ONLY, Need.ONE_STEP, Need.ONE_SIZE, Need.OWN_REFERENCE, Need.DEFAULT_CONTRACT},
    **{instrument.name: instrument.needs for instrument in instruments()},
}


def check_device(name: str, *, audits: bool = False) -> None:
    """Raise for a device that this machine lacks, or that audits do not support."""
    if name in ("auto", "cpu"):  # each machine has them, so torch need not be imported
        return
    from ampaudit.run.device import pick_device

    pick_device(name, audits=audits)


def rules_of(policy: Rules) -> RuleSet:
    """Return a policy's rules, loading them if only the name is given.

    Raises:
        PolicyError: The policy does not exist, or its file has a mistake.
    """
    return policy if isinstance(policy, RuleSet) else load_policy(policy)


def policies_of(policy: Rules | Sequence[Rules]) -> list[RuleSet]:
    """Return the rules of one policy or several, which one text may name with commas.

    Raises:
        PolicyError: The policy does not exist, or its file has a mistake.
    """
    if isinstance(policy, str) and not Path(policy).is_file():
        policy = [name.strip() for name in policy.split(",")]
    several = [policy] if isinstance(policy, str | Path | RuleSet) else policy
    if not isinstance(several, list | tuple) or not several:
        raise UsageError(
            f"policy = {describe(repr(policy))}", hint="pass a name, a path, a RuleSet or a list of them"
        )
    return [rules_of(one) for one in several]


def _conflicts() -> Iterator[tuple[str, str, Need]]:
    """Yield the pairs of options of which the first violates a need of the second, with that need."""
    for option, need in _VIOLATES.items():
        yield from ((option, other, need) for other, needs in _NEEDS.items() if need in needs)


def excluded_by(option: str) -> Iterator[str]:
    """Yield the options that cannot be combined with an option."""
    for first, second, _ in _conflicts():
        if option in (first, second):
            yield second if option == first else first


class PolicyConfig(Config):
    """Options of every command that applies a policy to a model."""

    policy: PolicyName = "ampaudit"
    dtype: DtypeName = "float16"
    device: DeviceName = "auto"
    seed: Seed = 0

    def check(self) -> None:
        """Raise early for a device that this machine lacks."""
        check_device(self.device, audits=True)


class PlanConfig(PolicyConfig):
    """Options of ``plan``, which applies a policy without running in 16 bits."""

    twins: TwinFile = None
    memory: Annotated[
        str,
        Option(
            "Memory limit: cut the model into segments that fit and run one after another.",
            metavar="SIZE",
        ),
    ] = ""

    def check(self) -> None:
        """Raise early for a missing device or an invalid size."""
        super().check()
        if self.memory:
            parse_size(self.memory)


class ScanConfig(*(instrument.options for instrument in reversed(instruments())), PlanConfig):  # type: ignore[misc]
    """Options of ``scan``, including those of the instruments."""

    policy: Annotated[Rules, Option("Policy name or rule file; separate several with commas.")] = "ampaudit"
    ranges: Annotated[bool, Option("Run FP32 once and show what each format would do.")] = False
    fail_on: FailOnOption = "error"
    min_headroom: MinHeadroom = MIN_HEADROOM
    min_sqnr: MinSqnr = MIN_SQNR
    advise: Annotated[bool, Option("Try changes for each error and print those that work.")] = False
    diff: Annotated[bool, Option("Print rewrites as a diff of the source; implies --advise.")] = False
    contract: Annotated[
        str,
        Option("Execution contract: lower-accumulate, saturate, flush-to-zero, decomposed.", metavar="WORDS"),
    ] = ""
    prove: Annotated[bool, Option("Prove sites safe for all inputs in range.")] = False
    stress: Annotated[
        int, Ge(0), Option("Search for inputs that overflow: N evaluations per site.", metavar="N")
    ] = 0
    stress_dir: Annotated[FilePath, python_only("Directory for the inputs found by --stress.")] = Path()
    steps: Annotated[
        int | None, Ge(1), Option("Run N steps, each on the outputs of the previous one.", metavar="N")
    ] = None
    next_inputs: Annotated[
        Any, python_only("Function next_inputs(outputs, inputs), or a scheduler; for steps.")
    ] = None
    static: Annotated[bool, Option("Compute proofs only, without a run.")] = False
    assume: Annotated[
        Texts,
        Option(
            "Range of an input for proofs; 'input' names all floating-point inputs (repeatable).",
            metavar="INPUT=LOW:HIGH",
        ),
    ] = ()
    ignore: Ignored = ()
    sweep: Annotated[
        str,
        BeforeValidator(sweep_text),
        Option(
            "Scan at several sizes of the inputs.",
            metavar="AXIS=N,N,...",
            accepts="str | Mapping[str, Sequence[int]]",
        ),
    ] = ""

    @property
    def requested(self) -> tuple[Instrument, ...]:
        """The instruments whose options are set."""
        return tuple(each for each in instruments() if getattr(self, each.name) not in (None, False, ""))

    @property
    def trains(self) -> bool:
        """Whether the model runs in training mode, unless an option says otherwise."""
        return any(instrument.trains for instrument in self.requested)

    @property
    def first_sizes(self) -> dict[str, int] | None:
        """Sizes to load the model with; ``None`` without a sweep."""
        if not self.sweep:
            return None
        axis, values = parse_sweep(self.sweep)
        return {axis: values[0]}

    def check(self) -> None:
        """Raise early for options that are invalid or that contradict each other."""
        for option, other, need in _conflicts():
            if getattr(self, option) and getattr(self, other):
                raise UsageError(
                    f"--{option} cannot be combined with --{other}, which needs {need.value}",
                    hint=f"leave out --{option} or --{other}",
                )
        if self.next_inputs is not None and self.steps is None:
            hint = "add steps=N, or leave it out"
            raise UsageError("next_inputs makes the inputs of further steps", hint=hint)
        super().check()
        if self.contract:
            from ampaudit.run.backends import parse_contract

            parse_contract(self.contract)
        for text in self.assume:
            parse_assumption(text)
        if self.sweep:
            parse_sweep(self.sweep)
