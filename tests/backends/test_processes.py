"""Kernels in forked and spawned processes, in DataLoader workers, and after an interrupt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNEL = """
import jax, jax.numpy as jnp
import tpu_kernels as tk

@tk.tpu_kernel("processes::scale")
def scale(x: jax.Array) -> jax.Array:
    return jnp.sin(x) * 2
"""

MAIN = """
import os, sys, warnings
import torch
from processes_kernel import scale, tk

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return scale(torch.full((4,), float(index)))

def child(check):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        check()
        os._exit(0)
    except BaseException as error:
        print(type(error).__name__, error, flush=True)
        os._exit(1)

def loaded(context):
    loader = torch.utils.data.DataLoader(
        Data(), batch_size=2, num_workers=2, multiprocessing_context=context
    )
    rows = torch.cat([batch for batch in loader])
    assert torch.allclose(rows[:, 0], torch.arange(6.0).sin() * 2)

if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="os.fork")
    assert child(lambda: scale(torch.ones(3))) == 0  # before the first call
    x = torch.ones(3, requires_grad=True)
    scale(x).sum().backward()
    scale(torch.ones(4))
    assert child(lambda: scale(torch.ones(4))) == 0  # what the parent has compiled runs
    print("new shape in a fork:", child(lambda: scale(torch.ones(5))))
    loaded("fork")
    loaded("spawn")
    print("parent:", scale(torch.ones(6)).shape[0])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_and_spawned_processes_and_data_loaders(tmp_path: Path) -> None:
    (tmp_path / "processes_kernel.py").write_text(KERNEL)
    (tmp_path / "main.py").write_text(MAIN)
    found = subprocess.run(
        [sys.executable, str(tmp_path / "main.py")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "DeviceError kernel 'processes::scale' has to be compiled" in found.stdout
    assert "processes_kernel.py:5" in found.stdout
    assert "multiprocessing_context='spawn'" in found.stdout
    assert "new shape in a fork: 1" in found.stdout
    assert "parent: 6" in found.stdout
