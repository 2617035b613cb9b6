"""Processes that cost a fork instead of an import of torch: a server imports everything once, each child is one program.

For programs whose start and last breath are not what a test is about; those start Python anew.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from functools import cache
from pathlib import Path
from typing import IO, Any

REPO = Path(__file__).resolve().parents[1]
LONGEST_ORDER = 2**17
POLL_SECONDS = 0.005


class Forked:
    """As much of subprocess.Popen as the tests need; its parent is the server."""

    def __init__(self, pid: int, stdout: IO[str], stderr: IO[str]) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _ask({"poll": self.pid})["code"]
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked program", timeout)
            time.sleep(POLL_SECONDS)
        return code

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.append(self.stderr.read()))
        reader.start()
        output = self.stdout.read()
        reader.join()
        self.stdout.close()
        self.stderr.close()
        self.wait(timeout)
        return output, errors[0]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Started = Forked | subprocess.Popen[str]


def fork(program: str, env: dict[str, str] | None = None) -> Started:
    """Run Python text in a child, with os and sys imported; `env` is added to this process's environment."""
    if sys.platform != "linux":  # messages with descriptors in them are Linux's
        words = [sys.executable, "-c", f"import os, sys\n{program}"]
        environment = {**os.environ, "PYTHONPATH": str(REPO), **(env or {})}
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
    order = {"program": program, "env": {**os.environ, **(env or {})}, "folder": os.getcwd()}
    pid = _ask(order, [out_write, err_write])["pid"]
    os.close(out_write)
    os.close(err_write)
    return Forked(pid, os.fdopen(out_read, encoding="utf-8"), os.fdopen(err_read, encoding="utf-8"))


def gptfit_program(words: list[str]) -> str:
    """What `python -m gptfit` does."""
    return f"from gptfit.cli import main\nsys.exit(main({words!r}))\n"


def _ask(order: dict[str, Any], descriptors: list[int] | None = None) -> dict[str, Any]:
    socket.send_fds(_server(), [json.dumps(order).encode()], descriptors or [])
    answer: dict[str, Any] = json.loads(_server().recv(LONGEST_ORDER))
    return answer


@cache
def _server() -> socket.socket:
    """One for all tests of this process; it ends when its end of the socket is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "tests.forking", str(theirs.fileno())]
    server = subprocess.Popen(words, pass_fds=[theirs.fileno()], env=environment, cwd=REPO, start_new_session=True)
    theirs.close()
    atexit.register(lambda: (ours.close(), server.wait()))
    return ours


TORCH = ("model", "device", "checkpoint", "train", "tune", "generate", "export", "doctor")


def import_everything(*more: str, with_torch: bool = True) -> None:
    """All of gptfit and what it imports late, so that no child pays for it."""
    import gptfit

    for module in pkgutil.walk_packages(gptfit.__path__, "gptfit."):
        is_light = module.name.split(".")[1] not in TORCH
        if not module.name.endswith("__main__") and (with_torch or is_light):
            with contextlib.suppress(ImportError):  # an extra that is not installed
                importlib.import_module(module.name)
    for name in more:
        importlib.import_module(name)
    if with_torch:
        _get_torch_ready()
    gc.collect()
    gc.freeze()


def _get_torch_ready() -> None:
    import torch

    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    _measure_once()


def _measure_once() -> None:
    """What a program finds out about the machine and remembers while it runs: half of the time of a short one."""
    from gptfit import gpus
    from gptfit.config.keys import TrainConfig
    from gptfit.device.device import find_device

    gpus.find_or_none("cpu")
    find_device(TrainConfig(device="cpu", dtype="float32")).measure_matmul_tflops()


def serve(channel: socket.socket) -> None:
    import_everything("torch._dynamo", "torch.distributed", "torch.nn.parallel", "rich.progress")
    codes: dict[int, int] = {}
    while True:
        text, descriptors, _, _ = socket.recv_fds(channel, LONGEST_ORDER, 2)
        if not text:
            return
        order = json.loads(text)
        if "poll" in order:
            done, status = (0, 0) if order["poll"] in codes else os.waitpid(order["poll"], os.WNOHANG)
            if done:
                codes[done] = os.waitstatus_to_exitcode(status)
            channel.send(json.dumps({"code": codes.get(order["poll"])}).encode())
            continue
        pid = os.fork()
        if pid == 0:
            channel.close()
            _be_the_program(order, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(json.dumps({"pid": pid}).encode())


def _be_the_program(order: dict[str, Any], descriptors: list[int]) -> None:
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for target, descriptor in enumerate(descriptors, 1):
            os.dup2(descriptor, target)
            os.close(descriptor)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["folder"])
        exec(order["program"], {"os": os, "sys": sys, "__name__": "__main__"})
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 - as python itself would show it
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
