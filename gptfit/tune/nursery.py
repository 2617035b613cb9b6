"""A nursery: a process that has imported a program, torch and all, and is forked for every run of it (on Linux).

Importing torch takes seconds, forking none. Whoever runs `command` instead of the program finds the same streams, exit code
and end; nothing of one run is left for the next. What is imported here must start no thread and touch no card.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gptfit.tune import nursery_client

LONGEST_QUEUE = 64


@contextlib.contextmanager
def nursery(module: str, environment: dict[str, str]) -> Iterator[Sequence[str]]:
    """The command that runs `module.main()` in a fork, at once from its second use on; elsewhere a fresh python's."""
    if not sys.platform.startswith("linux"):
        yield (sys.executable, "-m", module)
        return
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        name = str(Path(folder) / "nursery")
        try:
            listening.bind(name)
        except OSError:  # a temporary folder whose name is too long for a socket
            yield (sys.executable, "-m", module)
            return
        listening.listen(LONGEST_QUEUE)  # who comes before it is ready waits
        words = [sys.executable, "-m", "gptfit.tune.nursery", module, str(listening.fileno())]
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[listening.fileno()],
            env=os.environ | environment,
            start_new_session=True,  # Ctrl-C reaches the parent alone
        )
        listening.close()  # it has its own; when it ends, who waits there is told
        try:
            yield (sys.executable, "-IS", nursery_client.__file__, name)
        finally:
            assert process.stdin is not None
            process.stdin.close()  # its sign to end, as is this process's own end
            process.wait()


def serve(program: Callable[[], int], listening: socket.socket, lifeline: int = 0) -> None:
    """A fork for each who connects, until the lifeline (stdin) ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks' watchers
    waiting = selectors.DefaultSelector()
    for source in (lifeline, listening):
        waiting.register(source, selectors.EVENT_READ)
    while True:
        ready = [key.fileobj for key, _ in waiting.select()]
        if lifeline in ready:
            return
        connection, _ = listening.accept()
        if os.fork() == 0:  # Windows has none, and no nursery
            os._exit(_watch(program, connection, listening))
        connection.close()


def _watch(program: Callable[[], int], connection: socket.socket, listening: socket.socket) -> int:
    """One fork's parent: sends its exit code, and ends it when the one who asked is gone."""
    listening.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    streams = socket.recv_fds(connection, 1, 3)[1]
    child = os.fork()  # Windows never comes here
    if child == 0:
        connection.close()
        _become(program, streams)
    for stream in streams:
        os.close(stream)
    threading.Thread(target=_end_when_left, args=(connection, child), daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _end_group(child)  # its compiler workers may not have ended with it
    with contextlib.suppress(OSError):
        connection.send(min(code, 127).to_bytes(1, "big", signed=True))
    return 0


def _end_when_left(connection: socket.socket, child: int) -> None:
    connection.recv(1)  # the other side sends nothing more
    _end_group(child)


def _end_group(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # Windows never comes here


def _become(program: Callable[[], int], streams: Sequence[int]) -> None:
    """The program, with the streams of who asked, in a group of its own."""
    code = 1
    try:
        os.setsid()  # Windows never comes here
        for descriptor, given in enumerate(streams):
            os.dup2(given, descriptor)
            os.close(given)
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
        code = program()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:  # noqa: BLE001 - as python itself would show it
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main = importlib.import_module(sys.argv[1]).main
    with socket.socket(fileno=int(sys.argv[2])) as inherited:
        serve(main, inherited)
