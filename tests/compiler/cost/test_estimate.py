"""From dumped files to the figures that users see."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_kernels.compiler import chips, compile_function
from tpu_kernels.compiler.artifacts import Allocation, vmem_allocations
from tpu_kernels.compiler.cost.calibration import calibration, fitted_for
from tpu_kernels.compiler.cost.estimate import COPIES_NAME, estimate
from tpu_kernels.compiler.cost.figures import ModuleEstimate
from tpu_kernels.compiler.cost.scalars import KernelScalars, evaluate
from tpu_kernels.compiler.cost.selftest import selftest
from tpu_kernels.compiler.cost.timeline import step_ends
from tpu_kernels.errors import ArgumentError

LISTINGS = Path(__file__).with_name("listings")
Dump = Callable[..., list[Path]]


@pytest.fixture
def dump(tmp_path: Path) -> Dump:
    """Lay listings out as libtpu does."""

    def lay(**names: str) -> list[Path]:
        files = []
        for name, source in names.items():
            text = source
            if (LISTINGS / f"{source}.txt.gz").exists():
                text = gzip.decompress((LISTINGS / f"{source}.txt.gz").read_bytes()).decode()
            file = tmp_path / f"1796-{name}-01-final_bundles.txt"
            file.write_text(text)
            files.append(file)
        return files

    return lay


def test_a_matmul_is_estimated_within_its_bounds(dump: Dump) -> None:
    found = estimate(dump(matmul="matmul.v5e"), chips()["v5e"], libtpu_version=fitted_for())
    (kernel,) = found.kernels
    assert (found.confidence, found.warnings) == ("simulated", ())
    assert found.us == kernel.us
    # 2 * 2048^3 operations at 197 TFLOP/s, and 80 MiB at 820 GB/s.
    assert kernel.mxu_busy / chips()["v5e"].clock_hz * 1e6 == pytest.approx(87.4, rel=0.01)
    assert kernel.roofline_us == pytest.approx(102.3, rel=0.01)
    assert kernel.roofline_us < kernel.us < 1.5 * kernel.roofline_us
    assert kernel.bound == "hbm"
    assert 0 < kernel.efficiency < 1
    assert all(0 <= share <= 1 for share in kernel.utilization.values())
    assert kernel.utilization["mxu"] > 0.9


def test_copies_of_the_program_itself_are_counted(dump: Dump) -> None:
    files = dump(matmul="matmul.tpu7x", TLP="matmul.tpu7x.top")
    names = {kernel.name: kernel for kernel in estimate(files, chips()["tpu7x"]).kernels}
    copies = names[COPIES_NAME]
    assert copies.hbm_bytes >= 2 * 2048 * 2048 * 2  # both operands go to VMEM first
    assert copies.us > 0
    assert copies.cycles == copies.dma_stall


def test_shared_code_counts_as_often_as_it_is_used(dump: Dump, tmp_path: Path) -> None:
    files = dump(add="add.v6e")
    once = estimate(files, chips()["v6e"])
    shares = tmp_path / "1796-TLP-00-deduplication-map.txt"
    shares.write_text("key:add\nordinal:1\nequivalent_hlos[size=3]:\n  add\n  add.1\n  add.2\n")
    thrice = estimate([*files, shares], chips()["v6e"])
    assert once.us is not None
    assert thrice.us == pytest.approx(3 * once.us)


def test_without_a_listing_there_is_a_bound_and_no_time(dump: Dump) -> None:
    chip = chips()["v6e"]
    broken = estimate(dump(add="not a listing"), chip, hbm_bytes=164_000_000)
    assert (broken.us, broken.confidence) == (None, "roofline")
    assert broken.at_least_us == pytest.approx(100.0)
    assert "no bundles" in broken.text
    assert "µs" not in broken.text
    nothing = estimate([], chip)
    assert (nothing.us, nothing.at_least_us, nothing.confidence) == (None, None, "none")


def test_guesses_lower_the_confidence(dump: Dump) -> None:
    chip = chips()["v6e"]
    files = dump(grid="dynamic_grid.v6e")
    assert estimate(files, chip).confidence == "approximate"
    known = KernelScalars(("s32[]", "f32[64,128]"), {0: np.array(8, np.int32)})
    assert estimate(files, chip, scalars=[known]).confidence == "simulated"
    other = KernelScalars(("s32[]", "f32[64,256]"), {0: np.array(8, np.int32)})
    assert estimate(files, chip, scalars=[other]).confidence == "approximate"


def test_chips_without_measurements_and_other_compilers_are_marked(dump: Dump) -> None:
    v4 = estimate(dump(add="add.v4"), chips()["v4"])
    assert v4.confidence == "approximate"
    assert "no published times for v4" in v4.text
    other = estimate(dump(add="add.v6e"), chips()["v6e"], libtpu_version="9.9")
    assert "compiled with 9.9" in other.text


def test_estimates_survive_json(dump: Dump) -> None:
    found = estimate(dump(matmul="matmul.v6e"), chips()["v6e"])
    assert ModuleEstimate.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_a_calibration_follows_measurements_of_ones_own(dump: Dump) -> None:
    chip = chips()["v6e"]
    files = dump(matmul="matmul.v6e")
    before = estimate(files, chip)
    assert before.us is not None
    mine = calibration(chip).refit([(2 * before.us, before.us)], "mine")
    after = estimate(files, chip, fit=mine)
    assert after.us == pytest.approx(2 * before.us)
    assert "mine" in after.text
    with pytest.raises(ArgumentError, match="positive"):
        mine.refit([], "nothing")


def test_only_what_steers_a_kernel_is_computed() -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def kernel(steps: jax.Array, x: jax.Array) -> jax.Array:
        spec = pl.BlockSpec((8, 128), lambda i, s: (s[i], 0))
        return pl.pallas_call(
            lambda s, a, o: None,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1, grid=(4,), in_specs=[spec], out_specs=spec
            ),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        )(steps, x)

    def fn(lengths: jax.Array, x: jax.Array) -> jax.Array:
        starts = jnp.cumsum(lengths) - lengths  # from an argument that is known
        huge = jnp.dot(x, x.T) @ x  # not computed: nothing depends on it but data
        return jax.jit(kernel)(starts, huge)

    avals = [jax.ShapeDtypeStruct((4,), "int32"), jax.ShapeDtypeStruct((32, 128), "float32")]
    closed = jax.make_jaxpr(fn)(*avals)
    (found,) = evaluate(closed, {0: np.array([3, 1, 4, 1], np.int32)})
    assert found.shapes == ("s32[4]", "f32[32,128]")
    assert {index: value.tolist() for index, value in found.values.items()} == {0: [0, 3, 4, 8]}
    assert evaluate(closed, {})[0].values == {}

    def layers(lengths: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (kernel(2 * lengths, c), None), x, None, length=3)[0]

    (found,) = evaluate(jax.make_jaxpr(layers)(*avals), {0: np.array([3, 1, 4, 1], np.int32)})
    assert {index: value.tolist() for index, value in found.values.items()} == {0: [6, 2, 8, 2]}


@pytest.mark.libtpu
def test_reports_carry_the_estimate_and_its_scalars() -> None:
    from jax.experimental import pallas as pl

    def steps(x: jax.Array, count: jax.Array) -> jax.Array:
        def body(a, o):
            o[...] = a[...] + 1

        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        return pl.pallas_call(
            body,
            grid=(count[0],),
            in_specs=[spec],
            out_specs=spec,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        )(x)

    avals = [jax.ShapeDtypeStruct((1 << 16, 128), "float32"), jax.ShapeDtypeStruct((1,), "int32")]
    times = {}
    for count in (512, 4096):
        report = compile_function(
            steps, avals, "v6e", name="steps", concrete={1: np.array([count], np.int32)}
        )
        assert report.estimate is not None, report
        times[count] = max(kernel.us for kernel in report.estimate.kernels)
    assert times[4096] == pytest.approx(8 * times[512], rel=0.1)


@pytest.mark.libtpu
@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_the_installed_compiler_is_understood(chip: str) -> None:
    assert selftest(chip) == []


@pytest.fixture
def program(tmp_path: Path) -> list[Path]:
    """Files of a function with a Pallas kernel and an addition in a loop of 200, and a tanh."""
    texts = json.loads(gzip.decompress((LISTINGS / "program.v6e.json.gz").read_bytes()))
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return sorted(tmp_path.iterdir())


def test_a_whole_function_is_told_apart_into_kernels_and_what_xla_made(
    program: list[Path],
) -> None:
    found = estimate(program, chips()["v6e"], libtpu_version=fitted_for())
    kernels = {kernel.name: kernel for kernel in found.kernels}
    assert {name: kernel.kind for name, kernel in kernels.items()} == {
        "scaled.3": "pallas",
        "broadcast_add_fusion.2": "xla",
        "tanh.1": "xla",
        COPIES_NAME: "copies",
    }
    # The loop around the first two is skipped through and counts in full.
    assert [kernels[name].count for name in ("scaled.3", "broadcast_add_fusion.2")] == [200, 200]
    assert kernels["tanh.1"].op_name.endswith("tanh")
    assert sum(found.parts.values()) == pytest.approx(found.us)
    assert found.parts["pallas"] == pytest.approx(200 * kernels["scaled.3"].us)
    assert (found.unknown, found.guessed_us, found.confidence) == ((), 0.0, "simulated")
    assert "Pallas kernels 9" in found.text


def test_what_has_no_listing_is_named_and_lowers_the_confidence(program: list[Path]) -> None:
    rest = [file for file in program if not file.name.startswith("tanh")]
    found = estimate(rest, chips()["v6e"], libtpu_version=fitted_for())
    assert found.unknown == ("tanh.1",)
    assert found.confidence == "approximate"
    assert "of unknown time: tanh.1" in found.text


def test_vector_memory_is_told_buffer_by_buffer(program: list[Path]) -> None:
    found = estimate(program, chips()["v6e"])
    tanh = next(kernel for kernel in found.kernels if kernel.name == "tanh.1")
    assert tanh.vmem_bytes is not None
    assert sum(each.bytes for each in tanh.allocations) == tanh.vmem_bytes
    report = 'DATA = {"hlo_breakdowns": {"k": {"total_size": 80, "blocks": [{"block_size": 80, '
    report += '"block_type": "SCOPED", "allocations": [{"size": 64, "tag": "input window '
    report += "allocation for operator input 3. The window shape is bf16[2,8], while the full "
    report += 'shape is bf16[9,8]. This allocation has 2 buffering levels."}]}]}}}'
    window, rest = vmem_allocations(report)["k"][1]
    assert window == Allocation("input", "input 3", "bf16[2,8]", 2, 64)
    assert (rest.role, rest.bytes) == ("other", 16)
    assert vmem_allocations("no report") == {}


def test_copies_of_the_program_run_beside_its_kernels(dump: Dump) -> None:
    chip = chips()["tpu7x"]
    alone = {k.name: k for k in estimate(dump(TLP="matmul.tpu7x.top", x="add.v6e"), chip).kernels}
    beside = dump(TLP="matmul.tpu7x.top", matmul="matmul.tpu7x")
    # The same copies, some of them while the product runs.
    assert estimate(beside, chip).parts["copies"] <= alone[COPIES_NAME].us


def test_a_timeline_holds_the_first_and_the_last_steps(dump: Dump) -> None:
    (kernel,) = estimate(dump(matmul="matmul.v5e"), chips()["v5e"]).kernels
    timeline = kernel.timeline
    assert timeline is not None
    # 4 x 4 x 4 grid steps, and two more in which the pipeline fills and drains.
    assert timeline.total_steps == 66
    assert [number for number, _ in timeline.steps] == [0, 1, 2, 3, 4, 5, 62, 63, 64, 65]
    starts = [at for _, at in timeline.steps]
    assert starts == sorted(starts)
    assert 0 <= starts[0] < starts[-1] < timeline.cycles == kernel.cycles
    assert step_ends(timeline)[0] == starts[1]
    assert math.isnan(step_ends(timeline)[5])
    assert step_ends(timeline)[-1] == timeline.cycles
    for copy in timeline.transfers:
        assert 0 <= copy.issued <= copy.begins < copy.arrives <= timeline.cycles
    kinds = {copy.direction for copy in timeline.transfers}
    assert kinds == {"hbm->vmem", "vmem->hbm"}
    assert all(0 <= start < end <= timeline.cycles for start, end in timeline.waits)
    assert sum(end - start for start, end in timeline.waits) <= kernel.dma_stall
