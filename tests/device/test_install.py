"""Installing: once, with every assumption checked, and never over somebody else's device."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import platform
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tpu_kernels.backends import device
from tpu_kernels.backends.device import allocator, capsule, hooks, native, probe, selftest
from tpu_kernels.backends.device import installation as installing
from tpu_kernels.backends.torch_tpu import detection
from tpu_kernels.config import settings
from tpu_kernels.errors import DeviceError


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make the module believe that nothing was installed yet, in a torch that nobody claimed."""
    monkeypatch.setattr(installing, "_installed", False)
    monkeypatch.setattr(installing, "_complete", False)
    monkeypatch.setattr(installing, "_failure", None)
    monkeypatch.setattr(installing, "privateuse1_name", lambda: installing.UNCLAIMED)
    monkeypatch.setattr(installing, "_set_up", lambda: None)
    monkeypatch.setattr(installing, "on_install", [])
    return monkeypatch


def test_this_torch_passes_every_self_test() -> None:
    assert device.is_installed()
    assert device.why_not() is None
    assert device.limits() == {}


def test_installing_again_does_nothing(fresh: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fresh.setattr(installing, "_set_up", lambda: calls.append("set up"))
    installing.on_install.append(lambda: calls.append("hook"))
    threads = [threading.Thread(target=device.install) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    device.install()
    assert calls == ["set up", "hook"]


def test_a_hook_that_comes_late_is_called_at_once() -> None:
    calls: list[int] = []
    device.when_installed(lambda: calls.append(1))
    assert calls == [1]


def test_the_real_torch_tpu_keeps_its_device(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(detection, "owns_device", lambda: True)
    with pytest.raises(DeviceError, match=r"real TorchTPU.* owns the device 'tpu'"):
        device.install()
    assert not device.auto_install()
    assert "real TorchTPU" in str(device.why_not())


def test_torch_tpu_without_a_tpu_says_how_to_go_on(fresh: pytest.MonkeyPatch) -> None:
    fresh.setitem(sys.modules, "torch_tpu", ModuleType("torch_tpu"))
    with pytest.raises(DeviceError, match=r"(?s)TORCH_DEVICE_BACKEND_AUTOLOAD=0.*run --torch-tpu"):
        device.install()


def test_the_device_is_left_to_torch_tpu_on_a_machine_with_a_tpu(
    fresh: pytest.MonkeyPatch,
) -> None:
    fresh.setattr(detection, "is_installed", lambda: True)
    fresh.setattr(detection, "machine_has_tpu", lambda: True)
    with pytest.raises(DeviceError, match="this machine has a TPU"):
        device.install()


def test_torch_tpu_that_is_only_installed_is_no_obstacle(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(detection, "is_installed", lambda: True)
    fresh.setattr(detection, "machine_has_tpu", lambda: False)
    device.install()
    assert device.is_installed()


def test_a_tpu_is_found_on_the_bus(tmp_path: Path) -> None:
    assert not detection.machine_has_tpu(tmp_path)
    for vendor, chip, found in (
        ("0x10de", "0x006f", False),
        ("0x1ae0", "0x0042", False),  # another device of the vendor: a network card
        ("0x1ae0", "0x006f", True),
    ):
        folder = tmp_path / f"{vendor}-{chip}"
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{chip}\n")
        assert detection.machine_has_tpu(tmp_path) is found


def test_importing_torch_tpu_beside_the_simulation_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch_tpu", raising=False)
    (tmp_path / "torch_tpu.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("torch_tpu") is not None  # asking whether it is there is fine
    with pytest.raises(ImportError, match="simulated device of tpu_kernels"):
        importlib.import_module("torch_tpu")


def test_another_backend_keeps_the_device(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(installing, "privateuse1_name", lambda: "npu")
    with pytest.raises(DeviceError, match="'npu'"):
        device.install()


def test_the_setting_switches_the_device_off(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("TPU_KERNELS_SIM_DEVICE", "0")
    settings.cache_clear()
    try:
        assert not device.auto_install()
        with pytest.raises(DeviceError, match="TPU_KERNELS_SIM_DEVICE"):
            device.install()
    finally:
        fresh.undo()
        settings.cache_clear()


@pytest.mark.parametrize(
    ("where", "value"), [("machine", "aarch64"), ("python_implementation", "PyPy")]
)
def test_an_unknown_platform_ends_in_a_message(
    fresh: pytest.MonkeyPatch, where: str, value: str
) -> None:
    fresh.setattr(platform, where, lambda: value)
    with pytest.raises(DeviceError, match="needs CPython on Linux x86-64"):
        device.install()
    assert not device.auto_install()
    assert value in str(device.why_not())


def test_a_capsule_that_is_laid_out_differently_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capsule, "CAPSULE_POINTER_OFFSET", 24)
    with pytest.raises(DeviceError, match="PyCapsule keeps its pointer elsewhere"):
        selftest.check_capsule()
    monkeypatch.undo()
    monkeypatch.setattr(capsule, "KDL_CPU", 2)
    with pytest.raises(DeviceError, match="DLPack's struct is laid out differently"):
        selftest.check_capsule()


def test_a_failed_attempt_is_remembered(fresh: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise DeviceError("views do not work")

    fresh.setattr(installing, "_set_up", fail)
    with pytest.raises(DeviceError, match="views do not work"):
        device.install()
    with pytest.raises(DeviceError, match="an earlier attempt failed: views do not work"):
        device.install()


def test_peeking_at_unmapped_memory_is_an_error_not_a_crash() -> None:
    for address in (0, 8, 1 << 46, (1 << 64) - 8):
        with pytest.raises(DeviceError):
            probe.peek(address, 8)
    value = ctypes.c_uint64(0x1122334455667788)
    assert probe.peek_pointer(ctypes.addressof(value)) == 0x1122334455667788


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: ctypes.string_at(8), "the child died"),
        (lambda: "wrong numbers", "wrong numbers"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: threading.Event().wait(), "the child died"),
    ],
    ids=["crash", "complaint", "exception", "hang"],
)
def test_a_rehearsal_survives_what_is_rehearsed(
    action: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "REHEARSAL_SECONDS", 1)
    with pytest.raises(DeviceError, match=message):
        probe.rehearse(action, "the test")


def test_a_rehearsal_that_goes_well_is_silent() -> None:
    probe.rehearse(lambda: None, "the test")


def test_an_unknown_class_is_refused_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_KNOWN_CLASS", "SomebodysAllocator")
    monkeypatch.setattr(allocator, "_set_allocator", lambda address: None)
    with pytest.raises(DeviceError, match="not the class"):
        allocator.register()
    monkeypatch.setattr(hooks, "_KNOWN_CLASS", "SomebodysHooks")
    with pytest.raises(DeviceError, match="laid out differently"):
        hooks.register()
    with pytest.raises(DeviceError, match="no _ZNoSuchSymbol"):
        native.symbol("libc10.so", "_ZNoSuchSymbol")


def run_python(code: str) -> str:
    """Run code in a new interpreter with warnings as errors and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def test_without_its_optional_parts_the_device_works_and_says_what_is_missing() -> None:
    printed = run_python(
        """
        import copy, torch
        from tpu_kernels.backends.device import allocator, guard, hooks, install, limits
        allocator._KNOWN_CLASS = hooks._KNOWN_CLASS = guard._KNOWN_CLASS = "Other"
        install()
        print(sorted(limits().values()))
        x = torch.ones(2, 2, device="tpu", requires_grad=True)
        (x @ x).sum().backward()
        print(x.grad.tolist())
        for action in (lambda: copy.deepcopy(x.detach()), lambda: torch.Generator(device="tpu")):
            try:
                action()
            except RuntimeError as error:
                print(type(error).__name__, str(error).splitlines()[0])
        """
    )
    assert "torch's CPU allocator is not the class" in printed
    assert "torch's device guard is" in printed
    assert "torch's backend hooks are laid out differently" in printed
    assert "[[4.0, 4.0], [4.0, 4.0]]" in printed
    assert "DeviceError storages made on the device" in printed
    assert printed.count("Error") == 2


def test_a_new_process_installs_silently_by_import() -> None:
    printed = run_python(
        """
        import torch
        assert not hasattr(torch, "tpu")
        import tpu_kernels.device
        print(torch.ones(2, device="tpu") + 1)
        """
    )
    assert printed == "tensor([2., 2.], device='tpu:0')\n"
