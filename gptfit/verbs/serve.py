"""Serves the pages of a folder on this machine: which address, who may ask, until Ctrl-C."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gptfit.errors import RunError, UsageError

if TYPE_CHECKING:
    import socket

LOCAL = ("127.0.0.1", "localhost", "::1")
EVERY_ADDRESS = ("", "0.0.0.0", "::")
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


def address_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=0, help="of the page (default: a free one)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to bind; others than this machine need the token in the URL"
    )


def serve(folder: Path, args: argparse.Namespace, plan_args: argparse.Namespace, page: str = "") -> int:
    """The pages of `folder` and the plan page; `page` is the one whose address is printed."""
    import secrets

    import uvicorn

    from gptfit.pages.idle_connections import Impatient, raise_descriptor_limit
    from gptfit.pages.live import watch_app
    from gptfit.verbs.plan_page import plan_site

    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port {args.port}: use a number from 0 (any free port) to 65535")
    site = plan_site(plan_args)
    token = None if args.host in LOCAL else secrets.token_urlsafe(16)
    bound = _bind(args.host, args.port)
    app = watch_app(folder.resolve(), LOCAL_NAMES if token is None else (), token, site)
    print(f"open {_address(args.host, bound.getsockname()[1], page, token)} (Ctrl-C stops)", flush=True)
    raise_descriptor_limit()
    config = uvicorn.Config(
        app, http=Impatient, log_level="error", lifespan="off", ws="none", timeout_graceful_shutdown=1
    )
    uvicorn.Server(config).run(sockets=[bound])
    return 0


def _bind(host: str, port: int) -> socket.socket:
    """Listening before the address is printed, so that whoever opens it at once is served."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(128)
    except OSError as error:
        bound.close()
        raise RunError(f"{host}:{port} cannot be used: {error.strerror or error}", fix="try another --port") from error
    return bound


def _address(host: str, port: int, page: str, token: str | None) -> str:
    """One that can be opened: 0.0.0.0 is every address of this machine, and none to go to."""
    host = _own_address(host) if host in EVERY_ADDRESS else host
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/{page}" + (f"?token={token}" if token else "")


def _own_address(host: str) -> str:
    """The address other machines reach this one under; connecting a datagram socket sends nothing."""
    import socket

    family, elsewhere = (socket.AF_INET6, "2001:db8::1") if host == "::" else (socket.AF_INET, "192.0.2.1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
