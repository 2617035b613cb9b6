"""Tells a person who is elsewhere: a desktop notification, or a text posted to an address such as an ntfy topic."""

from __future__ import annotations

import shutil
import subprocess
import sys
import urllib.error
import urllib.request

from gptfit.errors import ConfigError

DESKTOP = "desktop"
LONGEST_WAIT_S = 10.0  # a server that does not answer is not waited for


def check_target(target: str) -> None:
    """Before the run: an address that cannot be one, or a desktop that has no notifications, is said at once."""
    if target == DESKTOP:
        if _desktop_command("", "") is None:
            raise ConfigError(
                "notify = 'desktop' needs notify-send, which is not here",
                fix="install it, or give an address: --notify=https://ntfy.sh/your-topic",
                key="notify",
            )
    elif target and not target.startswith(("http://", "https://")):
        raise ConfigError(
            f"notify = {target!r} is no address", fix="use desktop, or one that begins with https://", key="notify"
        )


def send(target: str, title: str, text: str) -> None:
    """Raises what goes wrong: whoever calls decides that nothing else ends for it."""
    if target == DESKTOP:
        command = _desktop_command(title, text)
        if command is not None:
            subprocess.run(command, check=True, capture_output=True, timeout=LONGEST_WAIT_S)
        return
    asked = urllib.request.Request(target, data=text.encode("utf-8"), headers={"Title": _ascii(title)})
    try:
        with urllib.request.urlopen(asked, timeout=LONGEST_WAIT_S) as answer:
            answer.read(1)
    except urllib.error.HTTPError as refusal:  # is the answer too, with its connection
        refusal.close()
        raise


def _desktop_command(title: str, text: str) -> list[str] | None:
    if sys.platform == "darwin":
        words = [part.replace("\\", " ").replace('"', " ") for part in (text, title)]
        return ["osascript", "-e", f'display notification "{words[0]}" with title "{words[1]}"']
    found = shutil.which("notify-send")
    return [found, "--app-name=gptfit", title, text] if found else None


def _ascii(text: str) -> str:
    """What a header may carry."""
    return text.encode("ascii", "replace").decode()
