"""Ray's cluster, with one actor per GPU and no automatic restarts."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from leanbench.cluster.cluster import ActorLost, Agent, Node
from leanbench.core.errors import UserError

#: Timeout of a cluster's address.
_KNOCK_S = 10.0


class RayCluster:
    """The Ray cluster at `address`, RAY_ADDRESS, or on this machine.

    Raises:
        UserError: Ray is not installed, no cluster answers, or versions differ.
    """

    def __init__(self, address: str | None) -> None:
        try:
            import ray
        except ImportError as error:
            raise UserError(
                f"--executor ray needs Ray ({error}): pip install '.[ray]' in a checkout of"
                " leanbench, or pip install 'ray>=2.60'"
            ) from None
        self._ray = ray
        address = address or os.environ.get("RAY_ADDRESS") or None
        _refuse_client(address)
        try:
            _knock(address)
            with _handler_of_sigterm_kept():
                context = ray.init(
                    address or "auto", log_to_driver=False, logging_level=logging.CRITICAL
                )
        except Exception as error:
            # It can be partly connected.
            ray.shutdown()
            raise UserError(_unreachable(address, error)) from None
        self.address: str = context.address_info["gcs_address"]

    def nodes(self) -> list[Node]:
        nodes = [
            Node(node["NodeID"], node["NodeManagerHostname"], int(node["Resources"].get("GPU", 0)))
            for node in self._ray.nodes()
            if node["Alive"]
        ]
        return sorted(nodes, key=lambda node: (node.host, node.name))

    def start(self, node: Node, gpus: int, agent: type[Agent], arguments: Sequence[Any]) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node.name, soft=False)
        actor = self._ray.remote(agent).options(
            num_gpus=gpus,
            num_cpus=0,
            # The dispatcher retries lost jobs.
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=there,
        )
        return actor.remote(*arguments)

    def call(self, actor: Any, method: str, *arguments: Any) -> Any:
        return getattr(actor, method).remote(*arguments)

    def done(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        first, _ = self._ray.wait(list(calls), num_returns=1, timeout=timeout_s)
        if not first:
            return []
        every, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
        return every

    def result(self, call: Any) -> Any:
        from ray.exceptions import RayError, RayTaskError

        try:
            return self._ray.get(call)
        except RayTaskError as error:
            if isinstance(error.cause, UserError | ActorLost):
                raise type(error.cause)(str(error.cause)) from None
            raise UserError(f"{type(error.cause).__name__}: {error.cause}") from None
        except RayError as error:
            raise ActorLost(_how_lost(error)) from None

    def stop(self, actor: Any) -> None:
        self._ray.kill(actor)

    def close(self) -> None:
        self._ray.shutdown()


def _refuse_client(address: str | None) -> None:
    if address is not None and address.startswith("ray://"):
        raise UserError(
            f"{address} is an address for Ray's client, which knows no nodes: name the cluster's"
            " own, HOST:6379 as `ray start --head` says it"
        )


@contextlib.contextmanager
def _handler_of_sigterm_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM. Ray's own ends the process without a message."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # Only the main thread can set one.
        if signal.getsignal(signal.SIGTERM) is not before:
            signal.signal(signal.SIGTERM, before)


def _knock(address: str | None) -> None:
    """Raise OSError if HOST:PORT does not listen. Ray itself would retry for minutes."""
    match = re.fullmatch(r"\[?(.+?)\]?:(\d+)", address or "")
    if match is not None:
        socket.create_connection((match[1], int(match[2])), timeout=_KNOCK_S).close()


def _unreachable(address: str | None, error: Exception) -> str:
    # Ray found no cluster.
    if address is None and isinstance(error, ConnectionError):
        return (
            "no Ray cluster runs on this machine: start one with `ray start --head`, or name one"
            " with --ray-address"
        )
    named = "of this machine" if address is None else f"at {address}"
    why = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if why.startswith("Version mismatch: "):
        return (
            f"the Ray cluster {named} is of other versions"
            f" ({why.removeprefix('Version mismatch: ')}): install the same Ray and Python here"
        )
    status = "ray status" if address is None else f"ray status --address {address}"
    return f"the Ray cluster {named} does not answer ({why}): check it with `{status}`"


def _how_lost(error: Exception) -> str:
    """Return the class of an error, or the message of an agent's constructor."""
    words = str(error)
    if "creation task" not in words:
        return type(error).__name__
    return words.strip().splitlines()[-1].strip()
