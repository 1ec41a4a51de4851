# SPDX-License-Identifier: Apache-2.0
"""Workers as actors of a Ray cluster: one detached actor per worker, which starts the worker's
process on its node.

Ray places workers and starts nodes for them; batches are sent over penstock's connections. Ray
does not restart actors (``max_restarts=0``), since only the adapter decides what runs. If Ray
drains a node, as before a preemption, its workers finish their batches and are replaced elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engines.engine import (
    NAME_VARIABLE,
    EngineError,
    EngineRefusal,
    WorkerCommand,
    WorkerState,
)

_NAMESPACE = "penstock"
_SHARED_VARIABLES = ("XDG_RUNTIME_DIR", "TMPDIR")
_ANSWER_S = 2.0  # for an actor's report on its process
_CONCURRENCY = 4  # so that a call that waits for the process does not delay others


class RayEngine:
    """An `Engine`. ``prefix`` starts the names of this pool's actors, and no other pool's.

    ``address`` is the address of a running cluster; "auto" finds the one of this machine. An actor
    takes ``cpus`` and the custom ``resources``. The nodes must have Python and penstock at the same
    paths as this machine. Connects on the first call, and again if the connection is lost.
    """

    title = "ray"

    def __init__(
        self,
        command: WorkerCommand,
        prefix: str,
        *,
        address: str = "auto",
        cpus: float = 1.0,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        self._command = command.arguments()
        self._prefix = prefix
        self._address = address
        self._cpus = cpus
        self._resources = dict(resources or {})
        # The location of this user's shared keys, which a node's environment may lack.
        self._variables = {
            name: os.environ[name] for name in _SHARED_VARIABLES if name in os.environ
        }
        self._requested_count: int | None = None
        self._asked: dict[str, Any] = {}  # actors and their pending requests
        self._states: dict[str, WorkerState] = {}
        self._nodes: dict[str, str] = {}  # the nodes on which they run, as far as known
        self._leaving: set[str] = set()

    def spawn(self, names: Sequence[str]) -> None:
        ray = self._connect()
        self._request(ray, len(self._states) + len(names))
        actor = ray.remote(_actor_class())
        options: dict[str, Any] = {
            "namespace": _NAMESPACE,
            "lifetime": "detached",
            "max_restarts": 0,
            "num_cpus": self._cpus,
            "resources": self._resources or None,
            "max_concurrency": _CONCURRENCY,
            "scheduling_strategy": "SPREAD",
        }
        for granted_count, name in enumerate(names):
            try:
                actor.options(name=name, **options).remote(
                    self._command, {**self._variables, NAME_VARIABLE: name}
                )
            except (ValueError, ray.exceptions.RayError) as error:
                raise EngineRefusal(f"Ray created no actor: {error}", granted_count) from error
            self._states[name] = WorkerState.STARTING

    def stop(self, name: str, *, at_once: bool) -> None:
        ray = self._connect()
        try:
            actor = ray.get_actor(name, namespace=_NAMESPACE)
        except ValueError:
            return
        if at_once or self._states.get(name) is WorkerState.STARTING:
            ray.kill(actor, no_restart=True)  # the worker ends with the actor that started it
        else:
            self._drain(name, actor)

    def _drain(self, name: str, actor: Any) -> None:
        self._leaving.add(name)
        actor.drain.remote()

    def workers(self) -> dict[str, WorkerState]:
        ray = self._connect()
        try:
            found = ray.util.list_named_actors(all_namespaces=True)
        except ray.exceptions.RayError as error:
            raise EngineError(f"Ray cannot list its actors: {error}") from error
        names = [
            actor["name"]
            for actor in found
            if actor["namespace"] == _NAMESPACE and str(actor["name"]).startswith(self._prefix)
        ]
        self._states = {name: self._states.get(name, WorkerState.STARTING) for name in names}
        self._update_states(ray)
        self._leaving &= self._states.keys()
        self._vacate_draining_nodes(ray)
        if self._requested_count is not None and len(self._states) < self._requested_count:
            self._request(ray, len(self._states))
        return {
            name: WorkerState.STOPPING if name in self._leaving else state
            for name, state in self._states.items()
        }

    def last_log_line(self, name: str) -> str:
        return ""  # Ray keeps the output of actors in a folder of the node

    def _connect(self) -> Any:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
            import ray.util
        except ImportError as error:
            raise EngineError(
                f"the engine ray requires the package ray, which cannot be imported ({error}); "
                "install it here and on the nodes of the cluster"
            ) from error
        if not ray.is_initialized():
            try:
                ray.init(
                    address=self._address,
                    namespace=_NAMESPACE,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise EngineError(f"no Ray cluster at {self._address}: {error}") from error
        return ray

    def _request(self, ray: Any, count: int) -> None:
        """Report to Ray's autoscaler, if there is one, the total resources of the workers."""
        from ray.autoscaler.sdk import request_resources

        if count != self._requested_count:
            request_resources(bundles=[{"CPU": self._cpus, **self._resources}] * count)
            self._requested_count = count

    def _update_states(self, ray: Any) -> None:
        """Query the state of each actor's process. Without an answer, the last state is kept."""
        for name in self._states.keys() - self._asked.keys():
            try:
                actor = ray.get_actor(name, namespace=_NAMESPACE)
            except ValueError:
                del self._states[name]
                continue
            self._asked[name] = (actor, actor.node.remote())
        self._asked = {name: asked for name, asked in self._asked.items() if name in self._states}
        pending = {answer: name for name, (_, answer) in self._asked.items()}
        if not pending:
            return
        ready, _ = ray.wait([*pending], num_returns=len(pending), timeout=_ANSWER_S)
        for answer in ready:
            name = pending[answer]
            actor, _ = self._asked.pop(name)
            try:
                node = ray.get(answer)
            except ray.exceptions.RayError:
                del self._states[name]  # the actor or its node is gone
                continue
            if node is not None:
                self._states[name] = WorkerState.RUNNING
                self._nodes[name] = node
            else:
                del self._states[name]
                ray.kill(actor, no_restart=True)

    def _vacate_draining_nodes(self, ray: Any) -> None:
        self._nodes = {name: node for name, node in self._nodes.items() if name in self._states}
        draining = _draining_nodes()
        for name in [name for name, node in self._nodes.items() if node in draining]:
            if name not in self._leaving:
                with contextlib.suppress(ValueError):
                    self._drain(name, ray.get_actor(name, namespace=_NAMESPACE))


def _draining_nodes() -> Mapping[str, int]:
    """Return the ids of nodes that Ray is about to remove. Ray has no public call for it; its
    libraries use this one. Return an empty mapping if a version of Ray has none."""
    from ray._private.state import state

    ask = getattr(state, "get_draining_nodes", None)
    nodes: Mapping[str, int] = {} if ask is None else ask()
    return nodes


def _actor_class() -> type:
    """Return a class that is pickled by value, so that the cluster's processes do not need
    penstock; only the worker that they start does."""

    class PenstockWorker:
        def __init__(self, arguments: list[str], variables: dict[str, str]) -> None:
            import ctypes
            import os
            import signal
            import subprocess

            libc = ctypes.CDLL(None)

            def end_with_parent() -> None:
                libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **variables},
                preexec_fn=end_with_parent,
            )

        def node(self) -> str | None:
            """Return the id of its node; None after the process has ended."""
            import ray

            if self._process.poll() is not None:
                return None
            return str(ray.get_runtime_context().get_node_id())

        def drain(self) -> None:
            self._process.terminate()

    return PenstockWorker
