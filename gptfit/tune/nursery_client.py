"""Stands for a fresh python: hands its streams to a nursery, and ends as the process that is forked there does.

Run by its path without the site packages (`python -IS`), so that it starts in milliseconds; the nursery's socket comes first.
"""

import os
import socket
import sys

if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        socket.send_fds(connection, [b"."], [0, 1, 2])
        answer = connection.recv(1)
    code = int.from_bytes(answer, "big", signed=True) if answer else 1
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)
