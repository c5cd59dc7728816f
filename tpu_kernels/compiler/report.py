"""What the TPU compiler said about a program, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tpu_kernels.compiler.cost.figures import ModuleEstimate

STATUSES = ("ok", "error", "vmem", "unsupported", "invalid", "timeout", "crashed", "unavailable")
"""Every status that a report may have; only ``"ok"`` means that the program runs on the target."""

_UNIT_NAMES = {
    "mxu": "MXU",
    "xlu": "XLU",
    "valu": "VALU",
    "eup": "EUP",
    "vld": "loads",
    "vst": "stores",
    "salu": "scalar",
}

_MEANING = {
    "ok": "compiles",
    "error": "refused by the compiler",
    "vmem": "does not fit into VMEM",
    "unsupported": "not supported on this target",
    "invalid": "not a valid TPU program",
    "timeout": "compilation ran out of time",
    "crashed": "the compiler crashed",
    "unavailable": "not checked",
}


@dataclass(frozen=True)
class CompileReport:
    """The outcome of compiling one program for one target.

    Attributes:
        status: One of `STATUSES`. ``"invalid"`` is a mistake in the program that no target accepts,
            ``"unsupported"`` something that this generation lacks, ``"vmem"`` a kernel that needs
            too much vector memory, ``"unavailable"`` a machine without the compiler.
        target: Name of the target.
        kernel: Name of the kernel or function.
        seconds: Time in the compiler.
        lowering_seconds: Time that tracing and lowering took.
        hbm_argument_bytes: Arguments in HBM, as laid out and padded by the compiler.
        hbm_output_bytes: Outputs in HBM.
        hbm_temp_bytes: Temporaries in HBM.
        code_bytes: Size of the generated code.
        vmem_bytes: Vector memory that the largest kernel allocates.
        vmem_limit_bytes: What it may allocate at most, where a message of the compiler names it.
        smem_bytes: Scalar memory that the largest kernel asks for, None if none does.
        bundles: Instruction bundles (VLIW) in the generated code, each counted once.
        spills: Vector registers that the compiler had to store to VMEM and load again, in stores.
        flops: Floating-point operations by XLA's count. Of a Pallas kernel it counts what its
            ``cost_estimate`` says, else nothing.
        hbm_traffic_bytes: Bytes that XLA counts as moved to and from HBM, Pallas kernels likewise.
        buffers: The largest values that the program keeps in HBM, by `buffers.largest`.
        estimate: Estimated time on the chip, by kernel; None unless the program compiles.
        error: What is wrong in plain words, None if nothing is.
        where: ``file:line`` in the author's source that the error belongs to.
        source_line: The text of that line.
        hint: What to do about it.
        compiler_text: The compiler's own message in full.
        cached: Whether the result comes from the cache.
        libtpu_version: Version of the compiler, None where it is not installed.
        jax_version: Version of JAX that lowered the program.
    """

    status: str
    target: str
    kernel: str
    seconds: float = 0.0
    lowering_seconds: float = 0.0
    hbm_argument_bytes: int | None = None
    hbm_output_bytes: int | None = None
    hbm_temp_bytes: int | None = None
    code_bytes: int | None = None
    vmem_bytes: int | None = None
    vmem_limit_bytes: int | None = None
    smem_bytes: int | None = None
    bundles: int | None = None
    spills: int | None = None
    flops: float | None = None
    hbm_traffic_bytes: float | None = None
    buffers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    estimate: ModuleEstimate | None = None
    error: str | None = None
    where: str | None = None
    source_line: str | None = None
    hint: str | None = None
    compiler_text: str | None = None
    cached: bool = False
    libtpu_version: str | None = None
    jax_version: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the program compiles for the target."""
        return self.status == "ok"

    @property
    def text(self) -> str:
        """The report for people: a first line with the verdict, then place, hint and figures.

        Example:
            >>> print(CompileReport("ok", "v6e", "tpu::f", seconds=1.5, hbm_temp_bytes=2 << 20))
            tpu::f on v6e: ok (compiles), 1.5 s
              HBM: temporaries 2.0 MiB
        """
        verdict = f"{self.kernel} on {self.target}: {self.status} ({_MEANING[self.status]})"
        if self.ok:
            verdict += ", from the cache" if self.cached else f", {self.seconds:.1f} s"
        lines = [verdict]
        if self.error:
            lines.append(f"  {self.error}")
        if self.where:
            lines.append(f"  at {self.where}")
        if self.source_line:
            lines.append(f"    {self.source_line}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        lines.extend(f"  {line}" for line in self._figures())
        return "\n".join(lines)

    def _figures(self) -> list[str]:
        hbm = {
            "arguments": self.hbm_argument_bytes,
            "outputs": self.hbm_output_bytes,
            "temporaries": self.hbm_temp_bytes,
        }
        lines = []
        if any(size is not None for size in hbm.values()):
            sizes = [f"{name} {mib(size)}" for name, size in hbm.items() if size is not None]
            lines.append("HBM: " + ", ".join(sizes))
        if self.vmem_bytes is not None:
            limit = f" of {mib(self.vmem_limit_bytes)}" if self.vmem_limit_bytes else ""
            scalar = f", SMEM: {mib(self.smem_bytes)}" if self.smem_bytes else ""
            lines.append(f"VMEM: {mib(self.vmem_bytes)}{limit}{scalar}")
        if self.code_bytes is not None:
            code = f"code: {self.code_bytes / 1024:.0f} KiB"
            if self.bundles is not None:
                code += f", {self.bundles} bundles"
            if self.spills:
                code += f", {self.spills} register spills"
            lines.append(code)
        if self.flops:
            traffic = (
                f", {mib(int(self.hbm_traffic_bytes))} moved" if self.hbm_traffic_bytes else ""
            )
            lines.append(f"XLA counts {self.flops / 1e9:.3g} GFLOP{traffic}")
        if self.estimate is not None:
            lines.extend(self.estimate.text.splitlines())
            lines.extend(_hot_loop(self.estimate))
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data that `json` takes.

        Returns:
            One entry per attribute, and ``ok``.

        Example:
            >>> CompileReport("vmem", "v5e", "f").to_dict()["ok"]
            False
        """
        return {**dataclasses.asdict(self), "ok": self.ok}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CompileReport:
        """Make a report of what `to_dict` returned.

        Args:
            data: Entries by attribute; unknown ones are ignored.

        Returns:
            The report.

        Raises:
            TypeError: If status, target or kernel is missing.

        Example:
            >>> report = CompileReport("ok", "v6e", "f", bundles=12)
            >>> CompileReport.from_dict(report.to_dict()) == report
            True
        """
        known = {field.name for field in dataclasses.fields(cls)}
        fields = {name: value for name, value in data.items() if name in known}
        if isinstance(fields.get("estimate"), Mapping):
            fields["estimate"] = ModuleEstimate.from_dict(fields["estimate"])
        return cls(**fields)

    def __str__(self) -> str:
        return self.text


def _hot_loop(estimate: ModuleEstimate) -> list[str]:
    """How busy the dearest kernel's innermost hot loop keeps each unit, as one line."""
    if not estimate.kernels:
        return []
    dearest = max(estimate.kernels, key=lambda kernel: kernel.us * kernel.count)
    shares = [
        f"{_UNIT_NAMES[unit]} {share:.0%}"
        for unit, share in sorted(dearest.utilization.items(), key=lambda item: -item[1])
        if unit in _UNIT_NAMES
    ]
    return [f"hot loop of {dearest.name}: {', '.join(shares)}"] if shares else []


class CompileReports(Mapping[str, CompileReport]):
    """Reports of one program for several targets.

    Args:
        reports: Report by name of the target.
    """

    def __init__(self, reports: Mapping[str, CompileReport]) -> None:
        self._reports = dict(reports)

    def __getitem__(self, target: str) -> CompileReport:
        return self._reports[target]

    def __iter__(self) -> Iterator[str]:
        return iter(self._reports)

    def __len__(self) -> int:
        return len(self._reports)

    @property
    def ok(self) -> bool:
        """Whether the program compiles for every target."""
        return all(report.ok for report in self._reports.values())

    @property
    def text(self) -> str:
        """All reports for people, one after the other."""
        return "\n".join(report.text for report in self._reports.values())

    def to_dict(self) -> dict[str, Any]:
        """Return all reports as plain data, by target."""
        return {target: report.to_dict() for target, report in self._reports.items()}

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        statuses = {target: report.status for target, report in self._reports.items()}
        return f"CompileReports({statuses})"


def mib(size: int) -> str:
    """Write a size in MiB, or KiB below a tenth of one.

    Args:
        size: Bytes.

    Returns:
        Such as ``"2.0 MiB"``.

    Example:
        >>> mib(3 << 20), mib(2048)
        ('3.0 MiB', '2.0 KiB')
    """
    if size < (1 << 20) // 10:
        return f"{size / 1024:.1f} KiB"
    return f"{size / (1 << 20):.1f} MiB"
