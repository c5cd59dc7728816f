"""`check` of an override: does it return what the original returns, and its gradients?"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpu_kernels.errors import ArgumentError
from tpu_kernels.registry.engine import current_mode
from tpu_kernels.registry.numerics.mxu import jax_precision
from tpu_kernels.registry.overrides import Override
from tpu_kernels.registry.overrides.chain import originals
from tpu_kernels.registry.overrides.checked import contract_problems, memory_of
from tpu_kernels.registry.overrides.targets import is_mutable, qualified
from tpu_kernels.verify.override_samples import (
    Sample,
    given_samples,
    mapped,
    tensors,
    torch_samples,
)
from tpu_kernels.verify.passes.tolerance import largest_error, tolerance
from tpu_kernels.verify.report import CheckReport, CheckRow
from tpu_kernels.verify.subject import failed

PASSES = ("contract", "numerics", "grad")
LIMIT = 20  # samples of each dtype
_ILL = 0.5  # an original this far from its own float64 result says nothing of an override


def check_override(
    override: Override,
    calls: Sequence[Any] | None,
    passes: Sequence[str] | None,
    limit: int = LIMIT,
) -> CheckReport:
    """Run an override and the original on the same calls and compare.

    Args:
        override: In force or not; it is put in force for the calls.
        calls: The user's calls; None for torch's own samples.
        passes: Some of `PASSES`, None for all.
        limit: Most of torch's samples per dtype.

    Returns:
        A report with the rows ``"samples"``, ``"declines"``, and one per pass.

    Raises:
        ArgumentError: A pass is unknown.
    """
    wanted = PASSES if passes is None else tuple(passes)
    for name in wanted:
        if name not in PASSES:
            raise ArgumentError(
                f"unknown pass {name!r} for an override", hint=f"the passes: {', '.join(PASSES)}"
            )
    started = time.perf_counter()
    own = calls is not None
    samples = (
        given_samples(override.op, calls or ())
        if own
        else torch_samples(override.op, override.device, limit)
    )
    comparison = _Comparison(override)
    counts = (override.hits, override.declines, override.errors)
    for sample in samples:
        comparison.forward(sample)
        if "grad" in wanted and not is_mutable(override.op):
            comparison.gradient(sample)
    # What the check itself called is no news of the model's.
    override.hits, override.declines, override.errors = counts
    seconds = time.perf_counter() - started
    rows = [dataclasses.replace(comparison.samples_row(samples, own), seconds=seconds)]
    rows.append(comparison.declines_row())
    rows += [comparison.row(name) for name in PASSES if name in wanted]
    return CheckReport(
        f"override of {qualified(override.op)} by {override.impl_name}", None, tuple(rows)
    )


@dataclasses.dataclass(frozen=True)
class _Problem:
    sample: Sample
    text: str


class _Comparison:
    """Collects what differs, sample by sample."""

    def __init__(self, override: Override) -> None:
        self.override = override
        self.taken = 0
        self.declined: collections.Counter[str] = collections.Counter()
        self.problems: dict[str, list[_Problem]] = {name: [] for name in PASSES}
        self.compared: collections.Counter[str] = collections.Counter()
        self.worst: dict[str, tuple[float, float, float]] = {}
        self.skipped: dict[str, str] = {}
        self.ill: collections.Counter[str] = collections.Counter()

    # -- one sample -------------------------------------------------------------------------

    def forward(self, sample: Sample) -> None:
        """Compare the results of one call."""
        outcome = self._overridden(sample, lambda args, kwargs: sample.function(*args, **kwargs))
        if outcome is None:
            return
        result, (args, kwargs) = outcome
        self.taken += 1
        try:
            original, plain = self._original(sample)
        except Exception as error:
            self._note(
                "contract", sample, f"it answers a call at which the original raises {error}"
            )
            return
        problems = contract_problems(result, original)
        if not is_mutable(self.override.op):
            if memory_of((result,)) & memory_of((args, kwargs)) and not (
                memory_of((original,)) & memory_of(plain)
            ):
                problems.append("the result shares the memory of an argument")
            before = tensors((sample.args, sample.kwargs))
            after = tensors((args, kwargs))
            problems += [
                f"it writes into tensor {index} of its arguments"
                for index, (a, b) in enumerate(zip(before, after, strict=True))
                if not _same(a, b)
            ]
        self.compared["contract"] += 1
        if problems:
            self._note("contract", sample, "; ".join(problems))
            return
        if self._random(sample, original):
            self.skipped["numerics"] = "the operator draws random numbers"
            return
        got, own = tensors((result, args, kwargs)), tensors((original, *plain))
        self._compare("numerics", sample, got, own, self._exact(sample) or own)

    def gradient(self, sample: Sample) -> None:
        """Compare the gradients of one call."""

        def differentiated(args: Any, kwargs: Any) -> Any:
            return _gradients(sample, args, kwargs)

        try:
            with originals():
                own = differentiated(*_copies(sample, "cpu", grad=True))
        except Exception as error:
            self.skipped["grad"] = f"the original has no gradient: {_first_line(error)}"
            return
        if own is None:
            self.skipped.setdefault("grad", "no result depends on a floating-point input")
            return
        if self._random(sample):
            self.skipped["grad"] = "the operator draws random numbers"
            return
        outcome = self._overridden(sample, differentiated, name="grad", grad=True)
        if outcome is None:
            return
        if outcome[0] is None:
            self._note("grad", sample, "the result does not require a gradient")
            return
        self.compared["grad"] += 1
        exact = self._exact(sample, differentiated, grad=True)
        self._compare("grad", sample, outcome[0], own, exact or own)

    def _overridden(
        self,
        sample: Sample,
        call: Callable[[Any, Any], Any],
        name: str = "contract",
        grad: bool = False,
    ) -> tuple[Any, tuple[Any, Any]] | None:
        """The result with the override in force, and the arguments; None if it did not answer."""
        override = self.override
        arguments = _copies(sample, override.device, grad=grad)
        hits, declines, errors = override.hits, override.declines, override.errors
        try:
            with torch.random.fork_rng(devices=[]), originals(override), override:
                torch.manual_seed(0)
                result = call(*arguments)
        except Exception as error:
            self._note(name, sample, f"it raised {_first_line(error)}")
            return None
        if override.errors > errors:  # and on_error="fallback" let the original answer
            self._note(name, sample, f"it raised {override.last_error}, and fell back")
            return None
        if override.hits == hits:
            if name == "contract":
                said = override.declines > declines
                reason = override.last_decline if said else "the call does not reach the operator"
                self.declined[reason or ""] += 1
            return None
        return result, arguments

    def _random(self, sample: Sample, original: Any = None) -> bool:
        """Whether the original's result depends on the seed."""
        if torch.Tag.nondeterministic_seeded not in self.override.op.tags:
            return False
        first = self._original(sample)[0] if original is None else original
        pairs = zip(tensors(first), tensors(self._original(sample, seed=1)[0]), strict=True)
        return not all(_same(a, b) for a, b in pairs)

    def _original(self, sample: Sample, seed: int = 0) -> tuple[Any, tuple[Any, Any]]:
        arguments = _copies(sample, self.override.device)
        with torch.random.fork_rng(devices=[]), originals():
            torch.manual_seed(seed)
            return sample.function(*arguments[0], **arguments[1]), arguments

    def _exact(
        self,
        sample: Sample,
        call: Callable[[Any, Any], Any] | None = None,
        grad: bool = False,
    ) -> list[torch.Tensor] | None:
        """The original on float64 copies, None where it takes none."""
        args, kwargs = _copies(sample, "cpu", grad=grad, dtype=torch.float64)
        try:
            with originals():
                if call is not None:
                    return call(args, kwargs)  # type: ignore[no-any-return]
                return tensors((sample.function(*args, **kwargs), args, kwargs))
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return None

    def _compare(
        self,
        name: str,
        sample: Sample,
        got: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor],
        exact: Sequence[torch.Tensor],
    ) -> None:
        if name == "numerics":
            self.compared[name] += 1
        # The original is computed exactly, the override as the chip would.
        product = jax_precision().upper() if current_mode().numerics == "tpu" else None
        dtypes = [t.dtype for t in (*got, *tensors((sample.args, sample.kwargs)))]
        for index, triple in enumerate(zip(got, own, exact, strict=True)):
            a, b, c = (_plain(t) for t in triple)
            if a.shape != c.shape:
                self._note(name, sample, f"gradient {index} has shape {list(a.shape)}")
                continue
            original_error, _ = largest_error(b, c, 0.0)
            if original_error > _ILL:
                self.ill[name] += 1
                continue
            inexact = c.is_floating_point() or c.is_complex()
            # The original is no more exact than its dtype either; twice its error is as good.
            rounded = tolerance(dtypes, sample.size, product)
            accepted = max(rounded, 2 * original_error) if inexact else 0.0
            error, place = largest_error(a, c, accepted)
            if error > self.worst.get(name, (-1.0, 0.0, 0.0))[0]:
                self.worst[name] = (error, original_error, accepted)
            if error > accepted:
                what = "gradient" if name == "grad" else "result"
                self._note(
                    name,
                    sample,
                    f"{what} {index}: {place}; error {error:.1e} of the largest value, the "
                    f"original's {original_error:.1e}, accepted {accepted:.1e}",
                )
                return

    def _note(self, name: str, sample: Sample, text: str) -> None:
        self.problems[name].append(_Problem(sample, text))

    # -- rows -------------------------------------------------------------------------------

    def samples_row(self, samples: Sequence[Sample], own: bool) -> CheckRow:
        """How many calls there were, and of where."""
        if not samples:
            return CheckRow(
                "samples",
                "unavailable",
                "torch has no samples that call this operator",
                hint="pass your own: check(override, (x, y)), or samples=[(x, y), ...]",
            )
        whose = "yours" if own else ", ".join(dict.fromkeys(s.source for s in samples))
        what = f"{len(samples)} calls ({whose}): {self.taken} answered"
        if self.taken or any(self.problems.values()):
            return CheckRow("samples", "ok", what)
        hint = "pass calls that it takes: check(override, (x, y)), or samples=[(x, y), ...]"
        return CheckRow("samples", "unavailable", f"{what}, so nothing is compared", hint=hint)

    def declines_row(self) -> CheckRow:
        """The reasons of the calls that were not answered."""
        if not self.declined:
            return CheckRow("declines", "ok", "none")
        reasons = [f"{count}x {reason}" for reason, count in self.declined.most_common(5)]
        more = len(self.declined) - len(reasons)
        told = "; ".join(reasons) + (f"; and {more} other reasons" if more > 0 else "")
        return CheckRow("declines", "ok", f"{sum(self.declined.values())} calls: {told}")

    def row(self, name: str) -> CheckRow:
        """The outcome of one pass over all samples; of several failures the smallest is told."""
        problems = self.problems[name]
        if problems:
            smallest = min(problems, key=lambda p: p.sample.size)
            what = f"{smallest.text}; at {smallest.sample}"
            if len(problems) > 1:
                what += f" (the smallest of {len(problems)} calls that fail)"
            return failed(name, what, self.override.where)
        if not self.compared[name]:
            reason = self.skipped.get(name, "no call was answered")
            return CheckRow(name, "skipped", reason)
        calls = f"{self.compared[name]} calls"
        if name == "contract":
            return CheckRow(name, "ok", f"shape, stride, dtype and device agree in {calls}")
        error, original_error, accepted = self.worst.get(name, (0.0, 0.0, 0.0))
        what = (
            f"{calls} against the original in float64: largest error {error:.1e} "
            f"(the original's {original_error:.1e}, accepted {accepted:.1e})"
        )
        if self.ill[name]:
            what += f"; {self.ill[name]} tensors left out that the original gets wrong as well"
        return CheckRow(name, "ok", what)


def _copies(
    sample: Sample, device: str, *, grad: bool = False, dtype: torch.dtype | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def copy(tensor: torch.Tensor) -> torch.Tensor:
        wide = dtype is not None and tensor.is_floating_point()
        kept = tensor.detach().clone().to(device, dtype if wide else None)
        return kept.requires_grad_() if grad and kept.is_floating_point() else kept

    args, kwargs = mapped((tuple(sample.args), dict(sample.kwargs)), copy)
    return args, kwargs


def _gradients(
    sample: Sample, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor] | None:
    """Gradients of a random weighted sum of the results; None if nothing requires one."""
    results = tensors(sample.function(*args, **kwargs))
    outputs = [t for t in results if t.requires_grad]
    inputs = [t for t in tensors((args, kwargs)) if t.requires_grad]
    if not outputs or not inputs:
        return None
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device, t.dtype)
        for t in outputs
    ]
    found = torch.autograd.grad(outputs, inputs, weights, allow_unused=True)
    return [
        torch.zeros_like(tensor) if gradient is None else gradient
        for gradient, tensor in zip(found, inputs, strict=True)
    ]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor on the CPU."""
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return dense.cpu()


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors agree to the bit, NaN with NaN."""
    a, b = _plain(a), _plain(b)
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
