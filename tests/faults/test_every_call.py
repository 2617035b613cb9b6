"""Every file call of a command fails or is its last one: one line, nothing lost, the same bytes after the next run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .commands import all_commands
from .harness import FAULTS, READS, Call, Fault, Server, can_run, scratch_folder, try_every_call

pytestmark = pytest.mark.skipif(not can_run(), reason="needs Linux and a C compiler")
COMMANDS = all_commands()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with scratch_folder() as scratch, Server(Path(scratch).resolve()) as running:
        yield running


@pytest.fixture(scope="module")
def light_server() -> Iterator[Server]:
    """Without torch, which takes most of the time of a fork."""
    with scratch_folder() as scratch, Server(Path(scratch).resolve(), with_torch=False) as running:
        yield running


def server_of(name: str, request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue("server" if COMMANDS[name].needs_torch else "light_server")
    return found


class InTurn:
    """Every call with one of the faults that fit it, in turn. What is done to the same file again and again is tried
    the first time (there is no file yet) and the second (there is one); what is only asked or read the first time."""

    def __init__(self) -> None:
        self._met: dict[tuple[str, str], list[int]] = {}

    def __call__(self, n: int, call: Call, fault: Fault) -> bool:
        met = self._met.setdefault((call.what, re.sub(r"-\d+\.tmp", ".tmp", call.path)), [])
        if n not in met:
            met.append(n)
        fitting = [possible for possible in FAULTS if possible.fits(call)]
        is_due = met.index(n) < (1 if call.kind & READS else 2)
        return is_due and fault == fitting[(len(self._met) + len(met)) % len(fitting)]


@pytest.mark.timeout(1200)  # a hundred commands each, half a minute on an idle core
@pytest.mark.parametrize("name", ["prepare chars", "train short"])
def test_calls_that_go_wrong_lose_nothing(request: pytest.FixtureRequest, name: str) -> None:
    """All of them in all ways is what the slow test tries."""
    tally = try_every_call(COMMANDS[name], server_of(name, request), InTurn())
    print(tally.line())
    assert not tally.findings, "\n".join(map(str, tally.findings))
    assert tally.trials > 10


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_call_goes_wrong_in_every_way(request: pytest.FixtureRequest, name: str) -> None:
    tally = try_every_call(COMMANDS[name], server_of(name, request))
    print(tally.line())
    assert not tally.findings, "\n".join(map(str, tally.findings))


def test_the_harness_sees_a_file_that_is_left_over(light_server: Server) -> None:
    """A command that writes in place, as none of ours may, is found out."""
    from .careless import careless_command

    tally = try_every_call(careless_command(), light_server)
    kinds = {finding.what for finding in tally.findings}
    assert {"other result", "traceback"} <= kinds
