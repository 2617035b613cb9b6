"""Every file call of a command fails or is its last one: one line, nothing lost, the same bytes after the next run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def one_fault(n: int, call: Call, fault: Fault) -> bool:
    """The faults that fit a call in turn; of calls that only ask a few."""
    fitting = [possible for possible in FAULTS if possible.fits(call)]
    return fault == fitting[n % len(fitting)] and not (call.kind & READS and n % 16)


def every_third(n: int, call: Call, fault: Fault) -> bool:
    return n % 3 == 0 and one_fault(n // 3, call, fault)


@pytest.mark.parametrize(("name", "choose"), [("prepare chars", one_fault), ("train short", every_third)])
def test_calls_that_go_wrong_lose_nothing(
    server: Server, name: str, choose: Callable[[int, Call, Fault], bool]
) -> None:
    """All of them in all ways is what the slow test tries."""
    tally = try_every_call(COMMANDS[name], server, choose)
    print(tally.line())
    assert not tally.findings, "\n".join(map(str, tally.findings))
    assert tally.trials > 10


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_call_goes_wrong_in_every_way(server: Server, name: str) -> None:
    tally = try_every_call(COMMANDS[name], server)
    print(tally.line())
    assert not tally.findings, "\n".join(map(str, tally.findings))


def test_the_harness_sees_a_file_that_is_left_over(server: Server) -> None:
    """A command that writes in place, as none of ours may, is found out."""
    from .careless import careless_command

    tally = try_every_call(careless_command(), server)
    kinds = {finding.what for finding in tally.findings}
    assert {"other result", "traceback"} <= kinds
