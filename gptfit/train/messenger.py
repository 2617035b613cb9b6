"""The sink that tells a person who is elsewhere when a run ends, stops, or goes wrong."""

from __future__ import annotations

from gptfit.logs.events import End, Event, Message
from gptfit.notify import send
from gptfit.units import count

# Kinds of messages worth disturbing somebody for, each told once a run.
ALARMING = ("nonfinite", "rollback", "overfit", "checkpoint_failed")


class Messenger:
    """Ends and alarms of one run; everything else is on the page."""

    def __init__(self, target: str, name: str) -> None:
        self._target, self._name = target, name
        self._told: set[str] = set()

    def append(self, event: Event) -> None:
        if isinstance(event, End):
            best = "" if event.best_val_loss is None else f", best validation loss {event.best_val_loss:.4f}"
            step = "" if event.step is None else f" at step {count(event.step)}"
            send(self._target, f"gptfit: {self._name} ended", f"{event.reason or 'done'}{step}{best}")
        elif isinstance(event, Message) and event.kind in ALARMING and event.kind not in self._told:
            self._told.add(event.kind)
            send(self._target, f"gptfit: {self._name}", event.message)

    def close(self) -> None:
        """Nothing is kept back."""
