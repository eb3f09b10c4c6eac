"""Messages between a sweep and its worker: JSON objects over a `multiprocessing` connection.

JSON and not pickle, because the code of the kernels under test runs in the worker. A request names
a problem and its kernels; before each answer, a message names the kernel whose code runs next.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

Message = dict[str, Any]


def send(connection: Connection, message: Message) -> None:
    """Sends one message.

    Raises:
        OSError: the other side is gone.
    """
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> Message:
    """Waits for one message.

    Raises:
        EOFError: the other side has closed the connection.
        OSError: the other side died in the middle of a message.
        ValueError: it is no JSON object.
        RecursionError: it is nested too deep.
    """
    message = json.loads(connection.recv_bytes())
    if not isinstance(message, dict):
        raise ValueError(f"a message is a JSON object, this is a {type(message).__name__}")
    return message
