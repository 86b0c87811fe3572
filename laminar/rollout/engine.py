"""What a replica asks of an engine. Token ids in, token ids and logprobs out; one engine a replica.

Every engine keeps three promises, and ``tests/rollout/test_engine_contract.py`` holds each to them:

- the logprob of a token is that of the distribution it was drawn from (temperature applied);
- the ids returned end with the stop token where one was drawn; nothing is decoded or re-encoded;
- after ``load`` no key or value computed with older weights is used again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from laminar.trajectory import Sampling, Version

if TYPE_CHECKING:
    import torch

__all__ = ["Delta", "Engine", "FinishReason", "Gauges", "Generated", "Generation"]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Generation:
    """A request to the engine. ``prefix_ids``/``prefix_logprobs`` were generated before (hand-over, failover):
    they are fed as context and counted against ``max_new_tokens``, and come back at the head of the result.
    ``waits_until`` (Unix seconds): it goes on when its environment has answered; until then it only holds its slot.
    """

    id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    prefix_ids: Sequence[int] = ()
    prefix_logprobs: Sequence[float] = ()
    waits_until: float = 0.0


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens of one running request that are new since the last call of ``progress``."""

    id: str
    start: int
    ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Generated:
    """The end of a request: all of its ids and logprobs (prefix included), and why it ended.

    ``first_token_at``: ``time.time()`` of the first new token; 0.0 if none came. ``waits_until``: of an aborted
    one that was waiting for its environment, what a new ``Generation`` is given.
    """

    id: str
    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    first_token_at: float = 0.0
    message: str = ""
    waits_until: float = 0.0


@dataclass(frozen=True, slots=True)
class Gauges:
    """Load of a replica. KV cache in tokens."""

    running: int
    waiting: int
    kv_used: int
    kv_total: int


class Engine(Protocol):
    """One model that generates for many trajectories at once."""

    version: Version | None
    """Version of the weights now loaded; None before the first ``load``."""

    def start(self) -> None:
        """Build the model and begin to serve. Blocking; called on a thread."""

    def submit(self, generation: Generation, on_finish: Callable[[Generated], None]) -> None:
        """Queue a request. ``on_finish`` is called exactly once, on any thread, and must not block."""

    def progress(self) -> list[Delta]:
        """New tokens of all running requests since the last call; one call for all keeps streaming cheap."""

    def abort(self, request_id: str) -> None:
        """End a request now: ``on_finish`` gets what it has, with ``finish_reason="abort"``."""

    def load(self, version: Version, tensors: Mapping[str, torch.Tensor]) -> None:
        """Swap the weights in place. Nothing may be running: ``RuntimeError`` otherwise. Blocking."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The weights now served, by name: what ``load`` wrote, so that their digest can be checked."""

    def alive(self) -> bool:
        """Whether it still generates; False after an error that it cannot recover from."""

    def gauges(self) -> Gauges:
        """Load at the end of the last decode step."""

    def close(self) -> None:
        """Stop serving; requests still running end with ``abort``. Idempotent, at most 10 s."""
