"""Held-out evaluation by the replicas that also train: each prompt sampled once and answered once greedily."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distributed import Client, Future, get_worker, wait

from laminar.errors import LaminarError, UserError
from laminar.flow.context import RunContext
from laminar.rollout.emulation import is_emulated
from laminar.rollout.tokens import encode, load_tokenizer
from laminar.settings import Evaluation, Policy
from laminar.trainer import checkpoint
from laminar.trajectory import Sampling, TrajectoryRequest, Version
from laminar_dask.environment import EnvironmentPlugin
from laminar_dask.trajectories import submit
from laminar_dask.waiting import within

__all__ = ["EvaluationJob", "evaluate_policy", "held_out_requests"]

SAMPLED, GREEDY = 0, 1
STALL_DEADLINE = 600.0
"""Seconds without one more answer after which an evaluation fails."""
CORRECT = 0.999
"""Greedy accuracy counts answers whose reward is the full one, up to rounding."""


def held_out_requests(
    prompts: Any,
    *,
    tokenizer: Any,
    context: RunContext,
    sampling: Sampling,
    at_least: Version,
    label: str,
) -> list[TrajectoryRequest]:
    """Two requests a prompt: sample 0 at the training temperature, sample 1 greedy."""
    now = time.time()
    environment = prompts.fingerprint()
    requests = []
    for index in range(len(prompts)):
        prompt = prompts.prompt(index)
        request = TrajectoryRequest(
            run=context.run_id,
            group=f"{label}-{index:06d}",
            sample=SAMPLED,
            group_size=2,
            prompt=prompt,
            prompt_ids=encode(tokenizer, prompt),
            sampling=sampling,
            environment=environment,
            purpose="evaluate",
            at_least=at_least,
            queued_at=now,
        )
        requests += [request, replace(request, sample=GREEDY, sampling=replace(sampling, temperature=0.0))]
    return requests


@dataclass
class EvaluationJob:
    """Held-out prompts under way, and what came back."""

    step: int
    version: Version
    requests: list[TrajectoryRequest]
    report: Callable[[Evaluation], None]
    results: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, request: TrajectoryRequest, result: dict[str, Any]) -> None:
        """One answer is in; the last one makes the report."""
        self.results[request.id] = (request.sample, result)
        if len(self.results) == len(self.requests):
            self.report(evaluation_of(list(self.results.values()), step=self.step, version=self.version))
            self.done.set()

    async def finish(self, stall: float = STALL_DEADLINE) -> None:
        """Wait for all answers. ``LaminarError`` if for ``stall`` seconds none came."""
        while not self.done.is_set():
            before = len(self.results)
            with contextlib.suppress(TimeoutError):
                await within(stall, self.done.wait())
            if len(self.results) == before:
                raise LaminarError(_stalled(before, len(self.requests), stall))


def _stalled(done: int, wanted: int, seconds: float) -> str:
    return (
        f"an evaluation has {done} of {wanted} answers, and none came for {seconds:.0f} s; "
        "the log of the rollout workers says what they do"
    )


def evaluation_of(results: list[tuple[int, dict[str, Any]]], *, step: int, version: Version) -> Evaluation:
    """Means over the answers; an answer without a reward counts as 0, so that a failing scorer cannot raise it.

    >>> evaluation_of([(0, {"reward": 1.0, "tokens": 4}), (1, {"reward": None, "tokens": 2})], step=1, version=1)
    Evaluation(reward_mean=1.0, greedy_accuracy=0.0, prompts=1, version=1, step=1, response_length_mean=4.0)
    """
    sampled = [result for sample, result in results if sample == SAMPLED]
    greedy = [result for sample, result in results if sample == GREEDY]
    return Evaluation(
        reward_mean=sum(result["reward"] or 0.0 for result in sampled) / max(1, len(sampled)),
        greedy_accuracy=sum((result["reward"] or 0.0) > CORRECT for result in greedy) / max(1, len(greedy)),
        prompts=len(sampled),
        version=version,
        step=step,
        response_length_mean=sum(result["tokens"] for result in sampled) / max(1, len(sampled)),
    )


async def evaluate_policy(policy: Policy, prompts: Any, context: RunContext) -> Evaluation:
    """The ``evaluate`` stage: the replicas of the run answer with the policy's final version."""
    if not isinstance(policy, Policy):
        raise UserError(f"evaluate got a {type(policy).__name__}; expected the Policy that post_train returned")
    worker = get_worker()
    if (known := policy.evaluations.get(prompts.fingerprint())) is not None:
        return known  # the stage ended with just this evaluation
    job = EvaluationJob(
        step=policy.step,
        version=policy.version,
        requests=held_out_requests(
            prompts,
            tokenizer=await asyncio.to_thread(_tokenizer, policy.checkpoint),
            context=context,
            sampling=policy.sampling,
            at_least=policy.version,
            label=f"final-{prompts.fingerprint()}",
        ),
        report=lambda evaluation: None,
    )
    async with Client(
        worker.scheduler.address, asynchronous=True, set_as_default=False, security=worker.security
    ) as client:
        scorer = EnvironmentPlugin(prompts.fingerprint(), prompts, deadline=policy.score_deadline)
        await client.register_plugin(scorer)
        futures = submit(client, job.requests)
        await _all_done(futures)
        results = await client.gather(futures)
    pairs = [(request.sample, result) for request, result in zip(job.requests, results, strict=True)]
    return evaluation_of(pairs, step=policy.step, version=policy.version)


async def _all_done(futures: Sequence[Future], stall: float = STALL_DEADLINE) -> None:
    """Wait for all futures. ``LaminarError`` if for ``stall`` seconds none was done."""
    done = -1
    while True:
        try:
            await wait(futures, timeout=stall)
            return
        except TimeoutError as error:
            before, done = done, sum(future.done() for future in futures)
            if done == before:
                raise LaminarError(_stalled(done, len(futures), 2 * stall)) from error


def _tokenizer(model: str) -> Any:
    """The tokenizer of a checkpoint, wherever it lies."""
    if is_emulated(model):
        return load_tokenizer(model)
    with checkpoint.as_local(model, weights=False) as folder:
        return load_tokenizer(str(folder))
