"""Two processes as two hosts: agreed to the bit, through skips, saves and deaths."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest

import jamp
from tests import many_hosts
from tests.many_hosts import CASES, LAST, OVERFLOW, SAVED
from tests.subprocesses import ROOT

ENVIRONMENT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


def ended(children, seconds):
    """Waits until all have ended or one has failed, and ends them all."""
    try:
        until = time.monotonic() + seconds
        codes = [None]
        while None in codes and not any(codes) and time.monotonic() < until:
            time.sleep(0.05)
            codes = [child.poll() for child in children]
        return codes
    finally:
        for child in children:
            child.kill()
            child.communicate()  # closes the pipe, too


def processes(folder, moment):
    """Runs the module twice: exit codes, what each printed, and standard error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.many_hosts", address]
    children, paths = [], [folder / f"{moment}{i}" for i in range(2)]
    with contextlib.ExitStack() as stack:
        for i, path in enumerate(paths):
            streams = [stack.enter_context(open(f"{path}.{k}", "wb")) for k in "oe"]
            child = subprocess.Popen(
                [*command, str(i), str(folder / "saved"), moment],
                cwd=ROOT,
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.PIPE,  # its end tells the child of ours
                stdout=streams[0],
                stderr=streams[1],
            )
            children.append(child)
        codes = ended(children, seconds=240)
    out, errors = ([p.with_suffix(f".{k}").read_text() for p in paths] for k in "oe")
    return codes, out, "\n".join(text[-2000:] for text in errors)


def report_of(out):
    lines = [line for line in out.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def first(folder):
    """What each process reports, of which the second dies at the end."""
    codes, out, errors = processes(folder, "first")
    reports = [report_of(text) for text in out]
    assert None not in reports, errors
    return codes, out, reports


@pytest.fixture(scope="module")
def second(folder, first):
    """What each reports of a start anew, from what the first ones saved."""
    codes, out, errors = processes(folder, "second")
    assert codes == [0, 0], errors
    return [report_of(text) for text in out]


def trail(reports, case):
    """What each process says of each step, without what may be NaN."""
    steps = [[dict(step) for step in r[case]["trail"]] for r in reports]
    losses = [[step.pop("loss") for step in each] for each in steps]
    return steps, losses


each_case = pytest.mark.parametrize("case", [*CASES, "sharded"])


@pytest.mark.parametrize("case", [*CASES, "redo", "from_numpy", "sharded"])
def test_all_devices_of_both_processes_hold_the_same_bits(first, case):
    _, _, reports = first
    (one, other), losses = trail(reports, case)
    assert one == other
    for step in one:
        assert len(step["bits"]) == 2
        assert len(set(step["bits"])) == len(set(step["counters"])) == 1
    np.testing.assert_array_equal(*losses)


@each_case
def test_an_overflow_on_one_process_skips_the_step_on_both(first, case):
    _, _, reports = first
    (steps, _), (losses, _) = trail(reports, case)
    bits = [step["bits"][0] for step in steps]
    assert bits[OVERFLOW] == bits[OVERFLOW - 1]
    assert len(set(bits)) == LAST - 1  # all other steps made something new
    np.testing.assert_array_equal(np.isfinite(losses), np.arange(LAST) != OVERFLOW)
    # By hand: two clean steps in a row double the scale, a skip halves it.
    names = ("scale", "unskipped", "skipped", "last")
    assert [tuple(step[name] for name in names) for step in steps] == [
        (256, 1, 0, False),
        (512, 0, 0, False),
        (256, 0, 1, True),
        (256, 1, 1, False),
        (512, 0, 1, False),
    ]


def linear_gradients(x):
    """Of the mean over 16 rows and 4 outputs of x @ w + x[:, :1] * b."""
    w = np.repeat(x.mean(0)[:, None], 4, axis=1) / 4
    return {"w": w, "b": np.full(4, x[:, 0].mean() / 4)}


@pytest.mark.parametrize("case", CASES)
def test_the_result_is_that_of_one_process_with_all_rows(first, case):
    masters = {k: np.float64(p) for k, p in many_hosts.PARAMS.items()}
    trace = {k: np.zeros_like(p) for k, p in masters.items()}
    losses = []
    for x in np.delete(np.float64(many_hosts.BATCHES), OVERFLOW, axis=0):
        losses.append((x @ masters["w"] + x[:, :1] * masters["b"]).mean())
        for k, g in linear_gradients(x).items():
            trace[k] = many_hosts.MOMENTUM * trace[k] + g
            masters[k] = masters[k] - many_hosts.LR * trace[k]
    _, _, reports = first
    for report in reports:
        assert report[case]["masters"] == {k: p.tolist() for k, p in masters.items()}
        found = [step["loss"] for step in report[case]["trail"] if not step["last"]]
        np.testing.assert_allclose(found, losses, rtol=0, atol=2e-3)  # in half
        assert report[case]["everywhere"]
        assert report[case]["compiled"] == 1


def test_sharded_masters_are_those_of_adam_in_float64(first):
    masters = {k: np.float64(p) for k, p in many_hosts.PARAMS.items()}
    mu, nu = ({k: 0 * p for k, p in masters.items()} for _ in range(2))
    for i, x in enumerate(np.delete(np.float64(many_hosts.BATCHES), OVERFLOW, 0), 1):
        residue = (x @ masters["w"] + masters["b"]) * 2 / (16 * 4)
        for k, g in {"w": x.T @ residue, "b": residue.sum(0)}.items():
            mu[k] = 0.9 * mu[k] + 0.1 * g
            nu[k] = 0.999 * nu[k] + 0.001 * g**2
            root = np.sqrt(nu[k] / (1 - 0.999**i)) + 1e-8
            masters[k] = masters[k] - many_hosts.ADAM_LR * mu[k] / (1 - 0.9**i) / root
    _, _, reports = first
    for report in reports:
        for k, p in report["sharded"]["masters"].items():
            np.testing.assert_allclose(p, masters[k], rtol=0, atol=5e-3)
        assert report["sharded"]["misplaced"] == []
        assert report["sharded"]["compiled"] == 1


def test_both_redo_a_batch_that_overflows_on_one(first):
    _, _, reports = first
    x = np.full((16, 8), 0.25)
    x[8:] = 8.0
    grads = linear_gradients(x)
    masters = {k: p - many_hosts.LR * grads[k] for k, p in many_hosts.PARAMS.items()}
    for report in reports:
        (step,) = report["redo"]["trail"]
        # Of the second process alone the gradients are 2, and 2 * 2**15 is inf in half.
        assert (step["scale"], step["skipped"], step["last"]) == (2.0**14, 0, False)
        assert report["redo"]["masters"] == {k: p.tolist() for k, p in masters.items()}


def test_params_that_each_process_has_as_numpy_will_do(first):
    _, out, reports = first
    for report in reports:
        found = report["from_numpy"]
        assert found["own"]
        for a, b in zip(found["trail"], report["O1 jit"]["trail"], strict=False):
            assert a["bits"] == b["bits"]
        loaded = found["restored"] | {"loss": None}
        assert loaded == found["trail"][-1] | {"loss": None}
        assert found["check"].startswith("FloatingPointError: Loss 0 skipped 1 steps")
        scaler = {"loss_scale": 256.0, "unskipped": 0}
        assert found["state_dict"] == {"loss_scaler0": scaler}
    assert [text.count("Selected optimization level O1") for text in out] == [1, 0]


# A process dies while all save


def test_a_dead_process_ends_the_others(first):
    codes, _, _ = first
    assert codes[1] == -signal.SIGKILL
    assert codes[0] != 0


def test_a_save_without_the_part_of_one_process_is_none(second):
    for report in second:
        assert report["steps"] == [0, SAVED]
        assert report["steps at the end"] == [0, SAVED, LAST]


def test_both_go_on_from_the_last_checkpoint_bit_for_bit(first, second):
    _, _, straight = first
    for before, after in zip(straight, second, strict=True):
        saved, *rest = before["sharded"]["trail"][SAVED - 1 :]
        assert after["restored"] == saved | {"loss": None}
        assert after["trail"] == rest
        assert after["lies"] == {"misplaced": [], "compiled": 1}
        assert after["other level"] == before["saved"]


def test_one_process_reads_what_two_have_saved(folder, first, second):
    _, _, (report, _) = first
    like = many_hosts.make("O1", many_hosts.PARAMS, jamp.optimizers.fused_adam(0.125))
    with ocp.CheckpointManager(folder / "saved") as manager:
        target = ocp.args.StandardRestore(jamp.to_checkpoint(like))
        found = jamp.from_checkpoint(like, manager.restore(SAVED, args=target))
    assert many_hosts.values(found.params) == report["saved"]
    assert (found.loss_scale, found.skipped_steps, found.step) == (256, 1, SAVED - 1)
