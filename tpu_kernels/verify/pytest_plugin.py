"""The pytest plugin: `tpu_kernels.testing.kernel_test` and ``@pytest.mark.tpu_kernel``.

pytest loads it in every run of every project that has this package installed, so nothing beyond
pytest and the standard library is imported before a test of a kernel is collected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from tpu_kernels.errors import ArgumentError
from tpu_kernels.testing import KernelTest, Plan, _names

if TYPE_CHECKING:
    from tpu_kernels.verify.report import CheckReport, CheckRow

MARKER = "tpu_kernel"
_FIXTURE = "_tpu_kernel_check"
# These passes share runs of the interpreter: asked for together they cost a third.
_TOGETHER = ("races", "bounds", "nan")
_PARAMETERS = tuple(field.name for field in dataclasses.fields(Plan))
_reports = pytest.StashKey[dict[tuple[str, ...], "CheckReport"]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("tpu_kernels", "tests of TPU kernels")
    group.addoption(
        "--tpu-target",
        default=None,
        metavar="CHIP[,CHIP...]",
        help="TPU generations that kernels are compiled for, in place of those that tests name; "
        "'none' for no compilation",
    )
    group.addoption(
        "--tpu-passes",
        default=None,
        metavar="PASS[,PASS...]",
        help="passes of tpu_kernels.check to run, of those that a test has",
    )
    group.addoption(
        "--tpu-shrink-s",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="time to look for the smallest failing call of a kernel, 0 for none (default: 20)",
    )
    parser.addini("tpu_targets", "TPU generations for tests of kernels that name none", "args", [])


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(kernel, targets=(), passes=None, config=None, shrink_s=None, timeout_s=300): "
        "check a kernel with the arguments that the function returns (tpu_kernels.testing)",
    )


@dataclasses.dataclass(frozen=True)
class _Check:
    """One pass, or one target of the pass ``"compile"``."""

    name: str
    target: str | None = None

    def __str__(self) -> str:
        return self.name if self.target is None else f"{self.name}-{self.target}"


def _checks(plan: Plan, config: pytest.Config) -> list[_Check]:
    """The tests that a plan makes, in the light of the command line."""
    from tpu_kernels.verify.check import DEFAULT_PASSES, PASSES

    targets = plan.targets or tuple(config.getini("tpu_targets"))
    override = config.getoption("--tpu-target")
    if override is not None:
        targets = () if override == "none" else tuple(override.split(","))
    passes = plan.passes
    if passes is None:
        passes = (*DEFAULT_PASSES, "compile") if targets else DEFAULT_PASSES
    for name in passes:
        if name not in PASSES:
            raise pytest.UsageError(f"unknown pass {name!r} (the passes: {', '.join(PASSES)})")
    only = config.getoption("--tpu-passes")
    if only is not None:
        passes = tuple(name for name in passes if name in only.split(","))
    found = [_Check(name) for name in passes if name != "compile"]
    if "compile" in passes:
        found += [_Check("compile", target) for target in targets]
    return found


class KernelItem(pytest.Item):
    """A test that `kernel_test` made."""

    def __init__(self, *, plan: Plan, make: Any, check: _Check, case: str, **options: Any) -> None:
        super().__init__(**options)
        self._plan, self._make, self._check, self._case = plan, make, check, case

    def runtest(self) -> None:
        """Run the pass."""
        arguments = self._make() if callable(self._make) else self._make
        key = (self.name.partition("[")[0], self._case)
        _run(self._plan, arguments, self._check, self, key)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Where the test is and what it is called."""
        return self.path, None, self.name


def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[KernelItem] | None:
    """Make a test for each call and pass of a `KernelTest`."""
    if not isinstance(obj, KernelTest) or not collector.funcnamefilter(name):
        return None
    items = []
    for case, make in obj.cases.items():
        for check in _checks(obj.plan, collector.config):
            label = "-".join(filter(None, (case, str(check))))
            item = KernelItem.from_parent(
                collector, name=f"{name}[{label}]", plan=obj.plan, make=make, check=check, case=case
            )
            items.append(item)
    return items


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each pass of a marked function."""
    mark = metafunc.definition.get_closest_marker(MARKER)
    if mark is None:
        return
    metafunc.fixturenames.append(_FIXTURE)
    metafunc.parametrize(_FIXTURE, _checks(_marked(mark), metafunc.config), ids=str)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run one pass of a marked function, with the arguments that it returns."""
    mark = pyfuncitem.get_closest_marker(MARKER)
    if mark is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    if not isinstance(arguments, (tuple, Mapping)):
        pytest.fail(
            f"{pyfuncitem.originalname} has to return the arguments of the kernel: a tuple, or a "
            f"dictionary by name; it returned {type(arguments).__name__}",
            pytrace=False,
        )
    check: Any = pyfuncitem.callspec.params[_FIXTURE]
    others = {k: v for k, v in pyfuncitem.callspec.params.items() if k != _FIXTURE}
    key = (pyfuncitem.originalname, repr(others))
    _run(_marked(mark), arguments, check, pyfuncitem, key)
    return True


def _marked(mark: pytest.Mark) -> Plan:
    try:
        given = dict(zip(_PARAMETERS, mark.args, strict=False))
        values = {**given, **mark.kwargs}
        for name in ("targets", "passes"):
            if values.get(name) is not None:
                values[name] = _names(values[name])
        return Plan(**values)
    except TypeError as error:
        raise pytest.UsageError(f"@pytest.mark.{MARKER}: {error}") from error


def _run(
    plan: Plan, arguments: Any, check: _Check, item: pytest.Item, key: tuple[str, ...]
) -> None:
    """Run one pass and turn its row into an outcome of pytest."""
    from tpu_kernels.compiler.versions import why_unavailable

    missing = why_unavailable() if check.name == "compile" else None
    if missing is not None:
        pytest.skip(f"{missing[0]}: {missing[1]}")
    report = _report(plan, arguments, check, item, key)
    rows = list(_about(report, check))
    for row in rows:
        if row.status in ("failed", "unavailable"):
            pytest.fail(_told(report, row, check), pytrace=False)
    if rows and all(row.status == "skipped" for row in rows):
        pytest.skip(rows[-1].what)


def _about(report: CheckReport, check: _Check) -> Iterator[CheckRow]:
    names = ("vmem", "compile") if check.name == "compile" else (check.name,)
    return (row for row in report.rows if row.name in names)


def _report(
    plan: Plan, arguments: Any, check: _Check, item: pytest.Item, key: tuple[str, ...]
) -> CheckReport:
    """The report that has the pass, shared with the passes that ride along."""
    from tpu_kernels.verify.check import check as run

    together = check.name in _TOGETHER
    module = item.getparent(pytest.Module)
    kept = (module or item).stash.setdefault(_reports, {})
    full_key = (*key, "together" if together else str(check))
    known = kept.get(full_key)
    if known is not None:
        return known
    passes = [check.name]
    if together:
        wanted = [c.name for c in _checks(plan, item.config)]
        passes = [name for name in _TOGETHER if name in wanted]
    shrink_s = plan.shrink_s
    if shrink_s is None:
        shrink_s = item.config.getoption("--tpu-shrink-s")
    args, kwargs = ((), arguments) if isinstance(arguments, Mapping) else (arguments, {})
    options: dict[str, Any] = {"config": plan.config, "timeout_s": plan.timeout_s}
    if check.name == "compile":
        options["target"] = check.target
    try:
        report: CheckReport = run(
            plan.kernel, args, passes=passes, shrink_s=shrink_s, **options, **kwargs
        )
    except ArgumentError as error:
        pytest.fail(f"the kernel does not take these arguments: {error}", pytrace=False)
    kept[full_key] = report
    return report


def _told(report: CheckReport, row: CheckRow, check: _Check) -> str:
    """A failure for people: the verdict in the first line, which pytest repeats in its summary."""
    first, *rest = row.what.splitlines() or [""]
    on = f" on {check.target}" if check.target else ""
    place = f" (at {row.where})" if row.where else ""
    lines = [f"{report.kernel}: {row.name}{on} {row.status}: {first}{place}", *rest]
    if row.source_line:
        lines.append(f"  > {row.source_line}")
    if row.hint:
        lines.append(f"hint: {row.hint}")
    if row.smallest:
        lines.append("smallest failing call found:")
        lines.extend(f"    {line}" for line in row.smallest.splitlines())
    return "\n".join(lines)
