"""The process that trials are forked from: everything heavy is imported once, then one child per command.

Reads one JSON order per line from stdin, answers with one JSON line each. Started with the fault library preloaded;
the child arms it and runs `gptfit.cli.main`, so that a trial costs a fork and not an import of torch.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from typing import Any

from gptfit.data.tokenizer import load_tokenizer
from tests.forking import import_everything


def main() -> None:
    # As at a terminal; what is started in the background ignores them, and Ctrl-C would be no trial.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    has_torch = "torch" in sys.argv[2:]
    import_everything(*sys.argv[2:], with_torch=has_torch)
    load_tokenizer("gpt2")  # kept in memory, and a second's work
    if has_torch:
        _trials_by_fork(sys.argv[1])
    print(json.dumps({"number": 0, "ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps({"number": order["number"], **_obey(order)}), flush=True)


def _trials_by_fork(socket_name: str) -> None:
    """`tune` starts a fresh python for each of its trials; here such a trial is forked too, from a process beside."""
    from gptfit.tune import nursery_client
    from gptfit.tune.nursery import serve
    from gptfit.tune.trial import main as trial
    from gptfit.tune.trial_process import run_process

    assert run_process.__defaults__
    command = (sys.executable, "-IS", nursery_client.__file__, socket_name)
    run_process.__defaults__ = (*run_process.__defaults__[:-1], command)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(socket_name)
    listening.listen(16)
    lifeline, held = os.pipe()
    if os.fork():
        listening.close()
        os.close(lifeline)
        return
    os.close(held)
    serve(trial, listening, lifeline)
    os._exit(0)


def _obey(order: dict[str, Any]) -> dict[str, Any]:
    child = os.fork()
    if child == 0:
        _be_the_command(order)
    waiting = os.pidfd_open(child)
    for _ in range(order["timeout"]):  # seconds, one at a time: an hour in which everything was stopped is no hang
        if select.select([waiting], [], [], 1.0)[0]:
            break
    os.close(waiting)
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        return {"code": os.waitstatus_to_exitcode(status)}
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return {"code": "hangs"}


def _be_the_command(order: dict[str, Any]) -> None:
    code = 1
    try:
        os.setsid()
        os.environ.update(order["env"])
        for name, descriptor in (("/dev/null", 0), (order["stdout"], 1), (order["stderr"], 2)):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC * (descriptor > 0)), descriptor)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
        for place, value in order["settings"].items():
            module, _, constant = place.rpartition(".")
            setattr(importlib.import_module(module), constant, value)
        record = os.open(order["record"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if order["record"] else -1
        _arm(order, record)
        code = _run(order["argv"])
        sys.stdout.flush()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:  # noqa: BLE001 - as python itself would show it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run(words: list[str]) -> int:
    """gptfit's own command line; or a script, for the harness to be tested with."""
    if words[0] == "run-script":
        sys.argv = words[1:]
        runpy.run_path(words[1], run_name="__main__")
        return 0
    from gptfit.cli import main as gptfit

    return gptfit(words)


def _arm(order: dict[str, Any], record: int) -> None:
    library = ctypes.CDLL(None)  # preloaded, so it is in the process already
    library.fault_arm(
        ctypes.c_long(order["n"]),
        ctypes.c_int(order["how"]),
        ctypes.c_int(order["errno"]),
        ctypes.c_int(order["passes"]),
        order["folder"].encode(),
        ctypes.c_int(record),
    )


if __name__ == "__main__":
    main()
