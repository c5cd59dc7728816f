"""The small functions that stand in for a plug-in's, and the plug-in's table: without a plug-in."""

from __future__ import annotations

import ctypes
import platform
import sys
from pathlib import Path

import pytest

from tpu_kernels.backends.torch_tpu import cpu_plugin, detection, machine_code, pjrt_api
from tpu_kernels.errors import DeviceError, MissingDependency

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="machine code of x86-64 Linux"
)

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)


@pytest.fixture(scope="module")
def page() -> machine_code.CodePage:
    return machine_code.CodePage()


def call(page: machine_code.CodePage, code: bytes, words: int = 16) -> tuple[int, list[int]]:
    """Run code with an argument struct of zeros; returns what it returned and the struct."""
    struct = (ctypes.c_uint64 * words)()
    return FUNCTION(page.add(code))(ctypes.addressof(struct)), list(struct)


def test_fields_are_stored_at_their_offsets(page: machine_code.CodePage) -> None:
    code = (
        machine_code.store_int32(16, -2)
        + machine_code.store_int64(24, 7)
        + machine_code.store_bool(33, True)
        + machine_code.store_pointer(40, 0x1122334455667788)
    )
    error, struct = call(page, code + machine_code.SUCCEED)
    assert error == 0
    assert struct[2] == 2**32 - 2
    assert struct[3] == 7
    assert struct[4] == 1 << 8
    assert struct[5] == 0x1122334455667788
    assert sum(map(bool, struct)) == 4  # and nothing else


def test_an_array_of_the_caller_is_filled(page: machine_code.CodePage) -> None:
    array = (ctypes.c_int32 * 4)(9, 9, 9, 9)
    struct = (ctypes.c_uint64 * 4)(0, 0, 0, ctypes.addressof(array))
    code = machine_code.fill_array(24, (1, -1, 3)) + machine_code.SUCCEED
    assert FUNCTION(page.add(code))(ctypes.addressof(struct)) == 0
    assert list(array) == [1, -1, 3, 9]


def test_calls_go_on_to_the_plug_in(page: machine_code.CodePage) -> None:
    seen: list[int] = []

    @FUNCTION
    def plugin(arguments: int) -> int:
        seen.append(pjrt_api.word(arguments).value if arguments else -1)
        return 77

    address = ctypes.cast(plugin, ctypes.c_void_p).value
    assert address is not None
    assert call(page, machine_code.jump(address))[0] == 77
    # An error is the plug-in's answer to a struct that claims to have no bytes.
    assert call(page, machine_code.failure(address))[0] == 77
    error, struct = call(page, machine_code.call_then_store(address, [(0x20, 5), (0x28, 6)]))
    assert error == 77
    assert (struct[4], struct[5]) == (5, 6)
    assert seen == [0, 0, 0]


def test_a_file_that_is_no_plug_in_is_named(tmp_path: Path) -> None:
    text = tmp_path / "plugin.so"
    text.write_text("not a library")
    for path in (str(text), "libm.so.6"):  # not loadable; loadable without the entry point
        with pytest.raises(DeviceError, match="is no PJRT plug-in"):
            pjrt_api.PjrtApi(path)


def test_what_is_missing_is_said_before_anything_is_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_plugin, "_active", None)
    monkeypatch.setattr(detection, "is_installed", lambda: False)
    with pytest.raises(MissingDependency, match="torch_tpu is not installed"):
        cpu_plugin.activate()
    monkeypatch.setattr(detection, "is_installed", lambda: True)
    monkeypatch.setattr(cpu_plugin, "KNOWN_PLUGINS", ())
    monkeypatch.delenv(cpu_plugin.PLUGIN, raising=False)
    with pytest.raises(MissingDependency, match=r"tpu_kernels\[torch-tpu-cpu\]"):
        cpu_plugin.activate()
    monkeypatch.setenv(cpu_plugin.PLUGIN, str(tmp_path / "none.so"))
    with pytest.raises(DeviceError, match=r"none\.so.*is not a file"):
        cpu_plugin.activate()
    (tmp_path / "none.so").write_text("")
    monkeypatch.setattr(detection, "is_loaded", lambda: True)
    with pytest.raises(DeviceError, match="loaded already"):
        cpu_plugin.activate()
    monkeypatch.setattr(detection, "is_loaded", lambda: False)
    monkeypatch.setattr(detection, "obstacle", lambda: "somebody has the device")
    with pytest.raises(DeviceError, match="somebody has the device"):
        cpu_plugin.activate()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(DeviceError, match="x86-64 only, this is linux aarch64"):
        cpu_plugin.activate()
    assert cpu_plugin.active() is None
