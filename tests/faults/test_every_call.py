"""Every file call of a command fails or is its last one: one line, nothing lost, the same bytes after the next run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .commands import all_commands
from .harness import FAULTS, Fault, Server, can_run, scratch_folder, try_every_call

pytestmark = pytest.mark.skipif(not can_run(), reason="needs Linux and a C compiler")
COMMANDS = all_commands()
QUICK = ("prepare chars", "train short")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with scratch_folder() as scratch, Server(Path(scratch).resolve()) as running:
        yield running


def one_fault_every_third_call() -> Callable[[int, Fault], bool]:
    """The faults in turn; all of them at all calls is what `make bench` tries."""
    return lambda n, fault: n % 3 == 0 and FAULTS[n // 3 % len(FAULTS)] == fault


@pytest.mark.parametrize("name", QUICK)
def test_calls_that_go_wrong_lose_nothing(server: Server, name: str) -> None:
    tally = try_every_call(COMMANDS[name], server, one_fault_every_third_call())
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
