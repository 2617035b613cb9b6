"""Every file call of a command made to fail, one after another: what a trial is, how it is run and judged."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
TIMEOUT_SECONDS = 300  # a hang, not a measurement: the machine may be busy
# Imported once by the process that trials are forked from.
IMPORTS = ("plotly.graph_objects", "pyarrow.parquet", "rich.progress")
WITH_TORCH = ("torch", "torch._dynamo")

READS, FREES, SYNCS, CLOSES = 1, 2, 4, 8
OFF, COUNT, KILL_BEFORE, KILL_AFTER, TORN, FAIL, FAIL_FROM_HERE, SHORT, SIGNAL = range(9)
KILLS = (KILL_BEFORE, KILL_AFTER, TORN)
CHANGES = ("open", "write", "fsync", "rename", "unlink", "rmdir", "link", "mkdir", "truncate", "fallocate", "chmod")
OPENINGS = ("open", "look", "list")
NAMED = (*OPENINGS, "rename", "unlink", "rmdir", "link", "mkdir", "truncate", "stat")


@dataclass(frozen=True)
class Fault:
    """What becomes of the n-th call. `passes`: kinds of calls that still work after a fault for good."""

    name: str
    how: int
    errno: int = 0  # or the signal
    passes: int = 0
    of: tuple[str, ...] = CHANGES  # the calls for which it makes sense

    def fits(self, call: Call) -> bool:
        return call.what in self.of and not (self.how == FAIL_FROM_HERE and call.kind & self.passes)


EVERYTHING = (*CHANGES, "look", "list", "read", "mmap", "stat", "room", "lock", "close")
FAULTS = (
    Fault("killed before", KILL_BEFORE),
    Fault("killed after", KILL_AFTER),
    Fault("killed in the middle of a write", TORN, of=("write",)),
    Fault("ENOSPC", FAIL, errno.ENOSPC),
    Fault("EIO", FAIL, errno.EIO, of=EVERYTHING),
    Fault("EROFS", FAIL, errno.EROFS),
    Fault("EACCES", FAIL, errno.EACCES, of=NAMED),
    Fault("EMFILE", FAIL, errno.EMFILE, of=OPENINGS),
    Fault("ENOMEM", FAIL, errno.ENOMEM, of=("mmap",)),
    Fault("ENOLCK", FAIL, errno.ENOLCK, of=("lock",)),
    Fault("a write that takes half", SHORT, of=("write",)),
    Fault("Ctrl-C", SIGNAL, signal.SIGINT, of=(*CHANGES, "look", "close")),
    Fault("SIGTERM", SIGNAL, signal.SIGTERM, of=(*CHANGES, "look", "close")),
    Fault("full from here on", FAIL_FROM_HERE, errno.ENOSPC, READS | FREES | CLOSES),
    Fault("read-only from here on", FAIL_FROM_HERE, errno.EROFS, READS | SYNCS | CLOSES),
    Fault("gone from here on", FAIL_FROM_HERE, errno.EIO, 0, of=EVERYTHING),
)


@dataclass(frozen=True)
class Call:
    """One file call of a command, as the library saw it."""

    kind: int
    what: str
    path: str


@dataclass(frozen=True)
class Command:
    """A command under test. `again` is what a person types after it went wrong; `state` is what must come out equal."""

    name: str
    argv: Callable[[Path], list[str]]
    prepare: Callable[[Path, Server], None]
    state: Callable[[Path], Any]
    again: Callable[[Path], list[str]] | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # module constants, to make a command short
    is_heard: bool = False  # stdout is a file of the folder, so that its writes fail too
    # What may be missing after a disk refused something (never after a kill): copies given up to make room.
    spare: str = "(?!)"
    needs_torch: bool = True
    # How this command says on stdout that something is wrong, if that is what it is for.
    report: str = "(?!)"
    # What is there when it says that it is done (exit code 0), whatever the disk refused; `state` unless told.
    promise: Callable[[Path], Any] | None = None


@dataclass
class Finding:
    """A trial that did not end as promised."""

    command: str
    n: int
    call: Call
    fault: str
    what: str
    detail: str

    def __str__(self) -> str:
        return f"{self.command}: call {self.n} ({self.call.what} {self.call.path}) {self.fault}: {self.what}\n    {self.detail}"


@dataclass
class Tally:
    """What the trials of one command showed."""

    command: str
    calls: list[Call] = field(default_factory=list)
    trials: int = 0
    findings: list[Finding] = field(default_factory=list)

    def line(self) -> str:
        kinds = Counter(finding.what for finding in self.findings)
        wrong = len(self.findings) - kinds["traceback"]
        return f"{self.command}: {len(self.calls)} calls, {self.trials} trials, {wrong} wrong, {kinds['traceback']} tracebacks"


class Server:
    """The process that forks a child per command."""

    def __init__(self, scratch: Path, with_torch: bool = True) -> None:
        """Without torch it begins sooner and forks faster, for commands that need none."""
        self.scratch = scratch
        environment = {
            **os.environ,
            "LD_PRELOAD": str(build_library(scratch)),
            "PYTHONPATH": str(REPO),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "RAYON_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), str(scratch / "trials"), *IMPORTS, *WITH_TORCH * with_torch],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what libraries say while they are imported; children have their own
            text=True,
            env=environment,
        )
        self._orders = 0
        assert self._answer(0)["ready"]

    def _answer(self, number: int) -> dict[str, Any]:
        """To the order of this number; an earlier one may have been given up meanwhile, by a test that took too long."""
        assert self._process.stdout
        for line in self._process.stdout:
            answer: dict[str, Any] = json.loads(line)
            if answer["number"] == number:
                return answer
        raise AssertionError("the process that forks the commands has ended")

    def run(
        self,
        argv: list[str],
        folder: Path,
        n: int = 0,
        fault: Fault | None = None,
        settings: dict[str, Any] | None = None,
        is_heard: bool = False,
    ) -> Ended:
        """One command in a child, with the fault at its n-th call below `folder`; without one the calls are counted."""
        out, err, record = (self.scratch / name for name in ("stdout", "stderr", "calls"))
        out = folder / "stdout.txt" if is_heard else out
        self._orders += 1
        order = {
            "number": self._orders,
            "argv": argv,
            "folder": str(folder),
            "n": n,
            "how": fault.how if fault else COUNT,
            "errno": fault.errno if fault else 0,
            "passes": fault.passes if fault else 0,
            "record": "" if fault else str(record),
            "stdout": str(out),
            "stderr": str(err),
            "timeout": TIMEOUT_SECONDS,
            "settings": settings or {},
            "env": {"GPTFIT_CACHE": str(folder / "cache"), "COLUMNS": "120"},
        }
        assert self._process.stdin
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        code = self._answer(self._orders)["code"]
        calls = [] if fault else [_call(line) for line in record.read_text(encoding="utf-8").splitlines()]
        return Ended(code, out.read_text(encoding="utf-8", errors="replace"), err.read_text(errors="replace"), calls)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int | str
    out: str
    err: str
    calls: list[Call]


def _call(line: str) -> Call:
    kind, what, path = line.split(" ", 2)
    return Call(int(kind), what, path)


def build_library(scratch: Path) -> Path:
    """The preloaded library, compiled here."""
    library = scratch / "faultlib.so"
    words = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "faultlib.c"), "-ldl"]
    subprocess.run(words, check=True)
    return library


def can_run() -> bool:
    return sys.platform == "linux" and shutil.which("cc") is not None


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """In memory where there is such a place: thousands of fsyncs cost nothing there."""
    shm = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="gptfit-faults-", dir=shm if shm.is_dir() else None)


def try_every_call(
    command: Command,
    server: Server,
    choose: Callable[[int, Call, Fault], bool] = lambda n, call, fault: True,
    on_trial: Callable[[int, Fault, list[Finding]], None] = lambda n, fault, findings: None,
) -> Tally:
    """All trials of a command that `choose` wants: the n-th call with that fault."""
    template, folder = server.scratch / f"{command.name} template", server.scratch / "trial"
    shutil.rmtree(template, ignore_errors=True)
    _fresh(folder, None)
    command.prepare(folder, server)
    shutil.move(folder, template)
    tally = Tally(command.name)
    _fresh(folder, template)
    undisturbed = _run(command, server, folder, command.argv(folder))
    assert undisturbed.code == 0, f"{command.name} undisturbed: {undisturbed}"
    tally.calls, expected = undisturbed.calls, _expected(command, folder)
    seen_well = {everything_in(template)}
    for n, fault in _trials(tally.calls, choose):
        _fresh(folder, template)
        findings = list(_try(command, server, folder, n, tally.calls[n - 1], fault, expected, seen_well))
        tally.trials += 1
        tally.findings += findings
        on_trial(n, fault, findings)
    shutil.rmtree(template)
    return tally


def _run(
    command: Command, server: Server, folder: Path, argv: list[str], n: int = 0, fault: Fault | None = None
) -> Ended:
    return server.run(argv, folder, n, fault, command.settings, command.is_heard)


def _state(command: Command, folder: Path) -> Any:
    (folder / "stdout.txt").unlink(missing_ok=True)  # what was said, of a command that is heard
    return command.state(folder)


@dataclass(frozen=True)
class Expected:
    """After a run that nothing disturbed: all that must come out in the end, and what exit code 0 promises at once."""

    state: Any
    promise: Any


def _expected(command: Command, folder: Path) -> Expected:
    return Expected(_state(command, folder), (command.promise or command.state)(folder))


def _trials(calls: list[Call], choose: Callable[[int, Call, Fault], bool]) -> Iterator[tuple[int, Fault]]:
    for n, call in enumerate(calls, 1):
        if _is_like_its_neighbours(calls, n - 1) or _is_one_of_many(calls, n - 1):
            continue
        for fault in FAULTS:
            if fault.fits(call) and choose(n, call, fault):
                yield n, fault


def _is_like_its_neighbours(calls: list[Call], i: int) -> bool:
    """Inside a row of writes of one temporary file, after its third: a checkpoint is dozens of them, all alike."""
    row = calls[max(0, i - 3) : i + 2]
    return calls[i].path.endswith(".tmp") and len(row) == 5 and all(call == calls[i] for call in row)


def _is_one_of_many(calls: list[Call], i: int) -> bool:
    """A question or a reading that is made again and again: the first two and the last speak for all."""
    if not calls[i].kind & READS:
        return False
    same = [place for place, call in enumerate(calls) if call == calls[i]]
    return i not in (*same[:2], same[-1])


def _fresh(folder: Path, template: Path | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if template is None:
        folder.mkdir()
    else:
        shutil.copytree(template, folder, symlinks=True)


def everything_in(folder: Path) -> str:
    """Every name and byte of a folder in one digest; equal ones are one and the same to whatever runs next."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        kind = "link" if path.is_symlink() else "folder" if path.is_dir() else "file"
        content = os.readlink(path).encode() if kind == "link" else path.read_bytes() if kind == "file" else b""
        total.update(f"{kind} {path.relative_to(folder)} {len(content)}\n".encode() + content)
    return total.hexdigest()


def _try(
    command: Command,
    server: Server,
    folder: Path,
    n: int,
    call: Call,
    fault: Fault,
    expected: Expected,
    seen_well: set[str],
) -> Iterator[Finding]:
    """The command with the fault, then again with the disk mended.

    `seen_well`: folders from which the second run was seen to end as it should; from the very same it is not run again.
    """
    ended = _run(command, server, folder, command.argv(folder), n, fault)

    def finding(what: str, detail: str) -> Finding:
        return Finding(command.name, n, call, fault.name, what, detail)

    if problem := _bad_ending(ended, fault, command.report):
        yield finding(*problem)
    argv = (command.again or command.argv)(folder)
    (folder / "stdout.txt").unlink(missing_ok=True)  # of a command that is heard
    if ended.code == 0 and (lacking := _lacking(command, folder, fault, expected)):
        yield finding("says it is done", f"{lacking} | {ended.out[-300:]} {ended.err[-300:]}")
    left = everything_in(folder)
    if left in seen_well:
        return
    again = _run(command, server, folder, argv)
    if again.code != 0:
        yield finding("traceback" if "Traceback" in again.err else "again fails", f"{again.code}: {again.err[-1500:]}")
        return
    found = _state(command, folder)
    if found == expected.state:
        seen_well.add(left)
        return
    wanted = _wanted(command, fault, expected.state, found)
    if found != wanted:
        yield finding("other result", difference(found, wanted) + f" | first ended {ended.code}: {ended.err[-300:]}")


def _lacking(command: Command, folder: Path, fault: Fault, expected: Expected) -> str | None:
    """What exit code 0 promised and is not there."""
    try:
        found = (command.promise or command.state)(folder)
    except Exception as error:  # noqa: BLE001 - whatever a half-written file does to its reader
        return f"{type(error).__name__}: {error}"
    wanted = _wanted(command, fault, expected.promise, found)
    return None if covers(found, wanted) else difference(found, wanted)


def covers(found: Any, wanted: Any) -> bool:
    """Whether all that is wanted is there. A lock or a temporary file that could not be removed may be there too: the
    next command removes it."""
    if isinstance(wanted, dict):
        return all(key in found and covers(found[key], value) for key, value in wanted.items())
    return set(wanted) <= set(found) if isinstance(wanted, list) else bool(found == wanted)


def _wanted(command: Command, fault: Fault, expected: Any, found: Any) -> Any:
    """What must be found, with the liberty that the fault gives in which older copies there are."""
    if fault.how in (*KILLS, SHORT) or not isinstance(expected, dict):
        return expected
    return with_other_copies(expected, found, command.spare, may_lack=fault.how != SIGNAL)


def _bad_ending(ended: Ended, fault: Fault, report: str) -> tuple[str, str] | None:
    """What is wrong with how a command ended: anything but done, or one line and exit code 1, or the kill itself."""
    if "Traceback" in ended.err or "Traceback" in ended.out or "Exception ignored" in ended.err:
        return "traceback", ended.err[-1500:]
    if ended.code == "hangs":
        return "hangs", ended.err[-500:]
    if ended.code in _expected_codes(fault):
        return None
    if ended.code == 1 and not ended.err and re.search(report, ended.out, re.MULTILINE):
        return None
    lines = ended.err.strip().splitlines()  # some verbs tell what they do on stderr before
    said = [line for line in lines if line.startswith("gptfit: ")]
    if ended.code != 1 or len(said) != 1 or lines[-1] != said[0]:
        return "not one line", f"exit {ended.code}: {ended.err[-800:]}"
    return None


def _expected_codes(fault: Fault) -> tuple[int, ...]:
    if fault.how in KILLS:
        return 0, -signal.SIGKILL
    return (0, 128 + fault.errno, -fault.errno) if fault.how == SIGNAL else (0,)


def with_other_copies(expected: dict[str, Any], found: dict[str, Any], spare: str, may_lack: bool) -> dict[str, Any]:
    """What is expected, with copies of other steps and never more of them: a signal saves once more than the plan, and a
    disk that refused one copy (`may_lack`) leaves an older one in its place, or none."""
    ours, theirs = ({key for key in state if re.fullmatch(spare, key)} for state in (expected, found))
    if len(theirs) > len(ours) or (len(theirs) < len(ours) and not may_lack):
        return expected
    rest = {key: value for key, value in expected.items() if key not in ours - theirs}
    return rest | {key: found[key] for key in theirs - ours}


def difference(found: Any, expected: Any, where: str = "") -> str:
    """The first place where two states differ, for a person."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(set(found) | set(expected), key=str):
            if key not in found or key not in expected:
                return f"{where}{key} is {'missing' if key not in found else 'left over'}"
            if found[key] != expected[key]:
                return difference(found[key], expected[key], f"{where}{key}: ")
    return f"{where}{str(found)[:300]} instead of {str(expected)[:300]}"
