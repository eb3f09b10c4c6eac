"""Messages between a sweep and its worker: JSON objects over a `multiprocessing` connection.

JSON instead of pickle, because the kernels under test run in the worker.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

Message = dict[str, Any]


def send(connection: Connection, message: Message) -> None:
    """Send one message; raise OSError if the other side ended."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> Message:
    """Wait for one message.

    Raises:
        EOFError: The other side closed the connection.
        OSError: The other side died in the middle of a message.
        ValueError: It is no JSON object.
        RecursionError: It is nested too deep.
    """
    message = json.loads(connection.recv_bytes())
    if not isinstance(message, dict):
        raise ValueError(f"a message is a JSON object, this is a {type(message).__name__}")
    return message
