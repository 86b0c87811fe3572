"""The learner: a model, its optimizer, and one step of the algorithm on rows of the experience table."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from laminar.errors import RunFailed
from laminar.trainer import checkpoint
from laminar.trainer.advantages import group_advantages
from laminar.trainer.batching import MicroBatch, collate, microbatches, split_by_tokens
from laminar.trainer.config import GRPO, AdamW
from laminar.trainer.logprobs import Head
from laminar.trainer.losses import Totals, token_losses
from laminar.trainer.model import ServedTensors, load_model, local_folder, tokenizer_files
from laminar.trainer.optimizer import build_optimizer, optimizer_state, restore_optimizer, set_learning_rate
from laminar.trainer.report import StepReport
from laminar.trainer.rows import Sample, rewards_of, samples_of, staleness_of, unscored

__all__ = ["Learner"]

logger = logging.getLogger(__name__)

_OPTIMIZER = "optimizer.pt"
_MAX_SKIPPED_IN_A_ROW = 3


class Learner:
    """A policy under training. Plain torch; one thread at a time.

    Parameters
    ----------
    model
        Folder or hub name of a causal language model.
    temperature
        Of the rollouts' sampling, > 0.
    seed
        Of the order of rows in mini-batches; nothing else here is random.
    max_tokens_per_microbatch
        Padded tokens of one forward pass.
    dtype
        Type that is computed in and served; weights and optimizer state are float32 throughout.
    device
        None takes a GPU where there is one.
    """

    def __init__(
        self,
        model: str | Path,
        algorithm: GRPO,
        optimizer: AdamW,
        *,
        temperature: float,
        seed: int,
        max_tokens_per_microbatch: int = 8192,
        dtype: str = "float32",
        device: str | None = None,
    ) -> None:
        if temperature <= 0:
            raise ValueError(f"temperature {temperature}: training wants samples drawn at a temperature above 0")
        self.algorithm = algorithm
        self.config = optimizer
        self.temperature = temperature
        self.max_tokens = max_tokens_per_microbatch
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.steps = 0
        self.skipped_in_a_row = 0
        folder = local_folder(str(model))
        self.model = load_model(folder, self.device)
        self.head = Head(self.model)
        self._tokenizer = tokenizer_files(folder)
        self._optimizer = build_optimizer(self.model, optimizer)
        self._order = torch.Generator().manual_seed(seed)

    @classmethod
    def load(cls, url: str, algorithm: GRPO, optimizer: AdamW, **settings: Any) -> Self:
        """Go on from a checkpoint: weights, optimizer state, order of rows and count of steps.

        ``settings`` as for the constructor. The next step is bit for bit the one that would have followed.
        """
        found = checkpoint.read(url)
        if found is None:
            raise FileNotFoundError(f"{url} holds no complete checkpoint")
        with checkpoint.as_local(url) as folder:
            learner = cls(folder, algorithm, optimizer, **settings)
            state = torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True)
        restore_optimizer(learner._optimizer, state["optimizer"])
        learner._order.set_state(state["order"])
        learner.skipped_in_a_row = state["skipped_in_a_row"]
        learner.steps = found.step
        return learner

    def save(self, url: str, *, step: int, version: int, extra: dict[str, Any]) -> None:
        """Write a checkpoint into the folder at ``url``, atomically (see ``laminar.trainer.checkpoint``)."""

        def fill(folder: Path) -> None:
            self.model.save_pretrained(folder)
            for name, content in self._tokenizer.items():
                (folder / name).write_bytes(content)
            state = {
                "optimizer": optimizer_state(self._optimizer),
                "order": self._order.get_state(),
                "skipped_in_a_row": self.skipped_in_a_row,
            }
            torch.save(state, folder / _OPTIMIZER)

        checkpoint.write(url, fill, step=step, version=version, extra=extra)

    def tensors(self) -> ServedTensors:
        """Weights to publish, by name, tied ones once, in the served type."""
        return ServedTensors(self.model, self.dtype)

    def step(self, rows: pa.Table, *, version: int, staleness_ceiling: int | None = None) -> StepReport:
        """One step on complete groups of scored rows.

        Parameters
        ----------
        rows
            Columns ``prompt_ids, response_ids, logprobs, loss_mask, reward, group_id, weight_version, finish_reason``.
        version
            Of the weights being updated.
        staleness_ceiling
            Largest allowed staleness of a row.

        Raises
        ------
        RunFailed
            Loss or gradient not finite for the third update in a row. Once or twice, the update is left out.
        ValueError
            Rows that cannot be trained: no reward, columns that do not fit, from the future or too stale.
        """
        started = time.perf_counter()
        staleness = staleness_of(rows, version, staleness_ceiling)
        rewards, groups = rewards_of(rows), rows["group_id"].to_pylist()
        advantages = group_advantages(rewards, groups, scale=self.algorithm.scale_advantages)
        samples = samples_of(rows, advantages)
        learning_rate = self.config.learning_rate(self.steps + 1)
        totals, norms, batches = self._train(samples, learning_rate)
        self.steps += 1
        return StepReport.of(
            totals,
            norms,
            rewards=rewards,
            groups=groups,
            staleness=staleness,
            lengths=[len(sample.response_ids) for sample in samples],
            finish_reasons=rows["finish_reason"].to_pylist(),
            learning_rate=learning_rate,
            microbatches=batches,
            seconds=time.perf_counter() - started,
        )

    @torch.no_grad()
    def token_logprobs(
        self,
        prompt_ids: Sequence[Sequence[int]],
        response_ids: Sequence[Sequence[int]],
        *,
        temperature: float | None = None,
    ) -> list[list[float]]:
        """Logprob of each response token, a list a row, in float32.

        ``temperature`` is the rollouts' unless another is given.
        """
        samples = [unscored(prompt, response) for prompt, response in zip(prompt_ids, response_ids, strict=True)]
        results: list[list[float]] = [[] for _ in samples]
        filled = [index for index, sample in enumerate(samples) if sample.loss_tokens]
        for part in split_by_tokens([samples[index].length for index in filled], self.max_tokens):
            indices = [filled[index] for index in part]
            batch = collate([samples[index] for index in indices]).to(self.device)
            logprobs, _ = self._logprobs(batch, temperature=temperature)
            counts = [samples[index].loss_tokens for index in indices]
            ends = np.cumsum(counts)
            for index, end, count in zip(indices, ends, counts, strict=True):
                results[index] = logprobs[end - count : end].tolist()
        return results

    def _train(self, samples: Sequence[Sample], learning_rate: float) -> tuple[Totals, list[float], int]:
        """All updates of one step: their figures, a gradient norm each, and how many micro-batches."""
        set_learning_rate(self._optimizer, learning_rate)
        minibatches = [part for rows in self._minibatches(samples) if (part := microbatches(rows, self.max_tokens))]
        if not minibatches:
            raise ValueError(f"none of {len(samples)} rows has a token that counts; expected a loss_mask with a 1")
        proximal: Sequence[Sequence[Tensor | None]] = [[None] * len(part) for part in minibatches]
        if len(minibatches) > 1:
            proximal = [[self._proximal(batch) for batch in part] for part in minibatches]
        totals, norms = Totals(), []
        for part, before in zip(minibatches, proximal, strict=True):
            figures, norm = self._update(part, before)
            totals.add(figures)
            norms.append(norm)
        return totals, norms, sum(len(part) for part in minibatches)

    def _minibatches(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Rows of each update: all of them, or equal shares in random order (some empty if there are few rows)."""
        if self.algorithm.minibatches == 1:
            return [list(samples)]
        order = torch.randperm(len(samples), generator=self._order).numpy()
        return [[samples[i] for i in part] for part in np.array_split(order, self.algorithm.minibatches)]

    def _update(self, batches: Sequence[MicroBatch], proximal: Sequence[Tensor | None]) -> tuple[Totals, float]:
        """Accumulate the gradient of one update and apply it; its norm is NaN if it had to be left out."""
        tokens = sum(batch.tokens for batch in batches)
        totals = Totals()
        self._optimizer.zero_grad()
        for batch, before in zip(batches, proximal, strict=True):
            totals.add(self._backward(batch.to(self.device), before, tokens))
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm).item()
        if math.isfinite(norm) and math.isfinite(totals.loss):
            self.skipped_in_a_row = 0
            self._optimizer.step()
            return totals, norm
        self._count_skipped(norm, totals)
        return totals, math.nan

    def _backward(self, batch: MicroBatch, proximal: Tensor | None, tokens: int) -> Totals:
        """Add the gradient of one micro-batch of an update that has ``tokens`` in all."""
        bonus = self.algorithm.entropy_coefficient
        logprobs, entropy = self._logprobs(batch, entropy_gradient=bonus > 0)
        before = logprobs.detach() if proximal is None else proximal
        losses = token_losses(logprobs, before, batch.logprobs, batch.advantages, self.algorithm)
        if bonus > 0:
            losses = losses - bonus * entropy
        (losses.sum() / tokens).backward()  # type: ignore[no-untyped-call]
        return Totals.of(losses.detach(), entropy, logprobs, before, batch.logprobs, batch.advantages, self.algorithm)

    @torch.no_grad()
    def _proximal(self, batch: MicroBatch) -> Tensor:
        return self._logprobs(batch.to(self.device))[0]

    def _logprobs(
        self, batch: MicroBatch, *, temperature: float | None = None, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        return self.head.token_logprobs(
            batch,
            temperature=self.temperature if temperature is None else temperature,
            dtype=self.dtype,
            entropy_gradient=entropy_gradient,
        )

    def _count_skipped(self, norm: float, totals: Totals) -> None:
        self.skipped_in_a_row += 1
        what = f"loss {totals.mean('loss'):.3g}, gradient norm {norm:.3g}, lr {self.config.lr:.3g}"
        logger.warning("update of step %d left out, not finite: %s", self.steps + 1, what)
        if self.skipped_in_a_row >= _MAX_SKIPPED_IN_A_ROW:
            raise RunFailed(
                f"training diverged: {self.skipped_in_a_row} updates in a row were not finite, the last in "
                f"step {self.steps + 1} ({what}); resume from the last checkpoint with a lower learning rate"
            )
