"""Long runs, several threads, Ctrl-C at any moment, and the end of the process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading

import psutil
import torch

from tests.device.models import losses


def test_training_for_300_steps_does_not_leak() -> None:
    weight = torch.randn(128, 128, device="tpu", requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    process = psutil.Process()

    def run(steps: int) -> int:
        for _ in range(steps):
            x = torch.randn(128, 1024, device="tpu")  # 512 KiB, freed each step
            x.view(-1)[::2].mul_(0.5)
            loss = (weight @ x).relu()[1:].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch.add(x, x, out=torch.empty(0, device="tpu"))
        return int(process.memory_info().rss)

    before = run(30)  # allocator and caches have warmed up
    grown = (run(300) - before) / 2**20
    assert grown < 20, f"{grown:.1f} MiB more after 300 steps"  # one leaked tensor each: over 150


def test_four_threads_train_at_once() -> None:
    expected = losses("tpu", steps=2)
    found: list[list[float]] = []
    lock = threading.Lock()

    def work() -> None:
        model = torch.nn.Linear(8, 8).to("tpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = torch.ones(4, 8, device="tpu")
        values = []
        for _ in range(15):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        with lock:
            found.append(values)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 4
    assert all(values[-1] < values[0] for values in found)
    assert losses("tpu", steps=2) == expected


def test_ctrl_c_in_the_middle_of_operators_leaves_a_usable_process() -> None:
    code = """
        import copy, random, signal, time
        import torch
        import tpu_kernels.device

        signal.signal(signal.SIGALRM, signal.default_int_handler)
        weight = torch.ones(16, 16, device="tpu", requires_grad=True)

        def work():
            torch.set_grad_enabled(True)  # an interrupted no_grad() leaves it off, on any device
            y = (weight @ weight.t()).relu()[1:].add(1).mul_(1)
            y.sum().backward()
            copy.deepcopy(y.detach()).resize_(600)
            torch.rand(4, generator=torch.Generator(device="tpu"), device="tpu")
            torch.mul(y.detach(), 2, out=torch.empty(0, device="tpu"))

        work()
        random.seed(0)
        interrupted = 0
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-3))
                for _ in range(50):
                    work()
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        weight.grad = None
        work()
        assert weight.grad.sum().item() == 16 * (15 * 31 + 15), weight.grad.sum()
        assert interrupted == 300, interrupted
        print("usable")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=250
    )
    assert (done.returncode, done.stdout) == (0, "usable\n"), done.stderr


# How a process may end, and the exit status that this must give.
WAYS_TO_END = {
    "pass": 0,
    "threads = [threading.Thread(target=train) for _ in range(4)]\n"
    "[thread.start() for thread in threads]\n"
    "[thread.join() for thread in threads]": 0,
    "sys.kept = train(), torch.UntypedStorage(64, device='tpu')  # freed last of all": 0,
    "sys.exit(7)": 7,
    "raise ValueError": 1,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)": -signal.SIGINT,
}

TRAINING = """
import ctypes, json, os, signal, sys, threading, time
import torch
import tpu_kernels.device
from tpu_kernels.backends.device import native

def train():
    model = torch.nn.Linear(64, 64).to("tpu")
    model(torch.randn(32, 64, device="tpu")).sum().backward()
    return model
"""

# torch's threads and C++ objects outlive the interpreter and use what the device gave them. Whether
# they do so before the process is gone is a race. So each process does it itself as well, in exit
# handlers that run when all Python objects are gone: it unwinds a stack, as torch's threads do when
# they end, and calls machine code of the device.
LATE_USE = """
at_exit = ctypes.CDLL(None).__cxa_atexit
at_exit.argtypes = [ctypes.c_void_p] * 3
unwind = native.address_of(ctypes.CDLL("libgcc_s.so.1")._Unwind_Backtrace)
visit = native.address_of(ctypes.CDLL(None).sched_yield)  # any function that returns 0: go on
assert at_exit(unwind, visit, None) == 0
assert at_exit(native.return_constant(0), None, None) == 0
"""

IN_FORKED_CHILDREN = """
children = {}
for ending in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        break
    children[child] = ending
else:
    ended = (os.wait() for _ in children)
    statuses = {children[child]: os.waitstatus_to_exitcode(status) for child, status in ended}
    print(json.dumps(statuses), flush=True)
    os._exit(0)
train()
exec(ending)
"""


def test_a_process_that_trained_ends_as_it_should() -> None:
    def start(code: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(list(WAYS_TO_END))],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    # Python overwrites what it frees: nothing works by luck on memory that is gone.
    forking = start(TRAINING + LATE_USE + IN_FORKED_CHILDREN, PYTHONMALLOC="malloc_debug")
    with forking, start(TRAINING + "train()") as plain:
        output, errors = forking.communicate(timeout=200)
        assert json.loads(output) == WAYS_TO_END, errors
        _, errors = plain.communicate(timeout=200)
        assert plain.returncode == 0, errors
