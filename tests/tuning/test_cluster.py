"""Work spread over a Ray cluster: lost actors, files, what cannot start. Ray runs on this machine,
in a program of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_kernels.cli.main import main
from tpu_kernels.errors import MissingDependency
from tpu_kernels.tuning import cluster

PROGRAM = '''
import json, os, signal, sys, time
from tpu_kernels.compiler.pool import Job, Outcome
from tpu_kernels.tuning.cluster import RayWorkers

class Runner:
    """Kills its actor at job 2, the first time, and at job 4, every time."""

    def run(self, job):
        number, flag = job.request["number"], job.request["flag"]
        if number == 4 or (number == 2 and not os.path.exists(flag)):
            open(flag, "a").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 3:
            raise OSError("disk full")
        with open(job.files[0]) as stream:
            return Outcome("done", result={"number": number, "pid": os.getpid()},
                           value=stream.read())

folder = sys.argv[1]
inputs = os.path.join(folder, "inputs")
with open(inputs, "w") as stream:
    stream.write("inputs")
jobs = [Job({"number": n, "flag": os.path.join(folder, "flag")}, b"", files=(inputs,))
        for n in range(6)]
started = []
with RayWorkers(count=2, runner=Runner) as workers:
    found = {index: outcome for index, outcome in workers.run_all(jobs, started.append)}
    lost = workers.lost
    first, second = workers.run(jobs[0]), workers.run(jobs[1])
    left = workers.run_all(jobs[:2])
    next(left)
    left.close()
print(json.dumps({
    "statuses": [found[n].status for n in range(6)],
    "details": [found[n].detail for n in range(6)],
    "values": [found[n].value for n in range(6)],
    "lost": lost,
    "started": started,
    "pinned": first.result["pid"] == second.result["pid"],
}))
'''

TUNING = """
import json, sys, torch, jax
import tpu_kernels as tk
from tpu_kernels.tuning import RayWorkers, TuningCache

@tk.tpu_kernel("cluster_test::add", reference=lambda x, **_: x + 1)
def add(x: jax.Array, *, kind: str = "plain") -> jax.Array:
    if kind == "abort":
        import os
        os.abort()
    if kind == "wrong":
        return x + 2
    return x + 1

import os, signal, subprocess, threading

def kill_an_actor(activity):
    # While the first candidates run, one of the actors is killed, once.
    if activity.stage != "tracing" or killed or len(activity.running) < 2:
        return
    found = subprocess.run(["pgrep", "-P", str(raylet()), "-f", "ray::Actor.run"],
                           capture_output=True, text=True).stdout.split()
    if found:
        killed.append(int(found[0]))
        os.kill(int(found[0]), signal.SIGKILL)

def raylet():
    import psutil
    return next(p.pid for p in psutil.Process().children(recursive=True) if p.name() == "raylet")

killed = []
x = torch.ones(8, 128)
with RayWorkers(count=2) as workers:
    report = tk.autotune(add, x, configs={"kind": ["plain", "abort", "other"]}, target="v6e",
                         measure="roofline", workers=workers, cache=sys.argv[1],
                         watch=kill_an_actor)
    on_cpu = tk.autotune(add, x, configs={"kind": ["plain", "wrong"]}, workers=workers, store=False)
    lost = workers.lost
print(json.dumps({
    "statuses": {row.config["kind"]: row.status for row in report.results},
    "on_cpu": {row.config["kind"]: row.status for row in on_cpu.results},
    "killed": len(killed), "lost": lost, "records": len(list(TuningCache(sys.argv[1]))),
}))
"""


def run(program: str, folder: Path) -> dict[str, object]:
    script = folder / "program.py"
    script.write_text(program)
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": "/tmp"}
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.slow
@pytest.mark.ray
def test_jobs_of_lost_actors_are_done_by_others(tmp_path: Path) -> None:
    answer = run(PROGRAM, tmp_path)
    assert answer["statuses"] == ["done", "done", "done", "crashed", "crashed", "done"]
    values = answer["values"]
    assert isinstance(values, list)
    assert values[2] == "inputs"  # tried again after its actor was lost
    details = answer["details"]
    assert isinstance(details, list)
    assert "disk full" in details[3]
    assert details[4] == "its machine or actor was lost 3 times"
    assert answer["lost"] == 4
    started = answer["started"]
    assert isinstance(started, list)
    assert (started.count(0), started.count(2), started.count(4)) == (1, 2, 3)
    assert answer["pinned"]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.skipif(
    os.environ.get("TPU_KERNELS_RAY") != "1", reason="half a minute: TPU_KERNELS_RAY=1"
)
def test_a_search_on_a_cluster_ends_as_one_on_this_machine(tmp_path: Path) -> None:
    answer = run(TUNING, tmp_path)
    assert answer["statuses"] == {"plain": "ok", "abort": "crashed", "other": "ok"}
    assert answer["on_cpu"] == {"plain": "ok", "wrong": "wrong"}
    assert answer["killed"] == 1
    assert answer["lost"] == 1
    assert answer["records"] == 1


def test_without_ray_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "available", lambda: False)
    with pytest.raises(MissingDependency, match=r"tpu_kernels\[ray\]"):
        cluster.RayWorkers()
    assert main(["tune", "tpu::matmul", "--ray"]) == 2
    assert main(["tune", "tpu::matmul", "--ray-workers", "2"]) == 2
    assert "without --ray" in capsys.readouterr().err
