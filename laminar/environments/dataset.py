"""Prompts from a JSONL or Parquet file, scored by a reward function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from laminar.environments.answers import exact_match
from laminar.environments.environment import Environment
from laminar.environments.fingerprint import fingerprint
from laminar.environments.records import SUFFIXES, Records, read_records
from laminar.environments.rewards import RewardFunction
from laminar.errors import UserError
from laminar.suggest import listed, nearest
from laminar.trajectory import Prompt, Score

__all__ = ["Dataset", "dataset"]

_USUAL = {
    "prompt": ("prompt", "question", "problem", "instruction", "query", "input", "text"),
    "answer": ("answer", "solution", "ground_truth", "target", "label", "expected", "output"),
}
"""Columns that usually hold what a role needs, best first."""


def dataset(
    path_or_url: str | Path,
    *,
    prompt: str = "prompt",
    answer: str = "answer",
    reward: Callable[..., object] = exact_match,
) -> Dataset:
    """Prompts and answers from a file, e.g. ``dataset("gsm8k.parquet", prompt="question", reward=my_reward)``.

    The file is read when it is first needed, once a process.

    Parameters
    ----------
    path_or_url
        A ``.jsonl``, ``.ndjson``, ``.json`` or ``.parquet`` file: a path, or any URL that fsspec opens.
    prompt
        The column with what the model is asked, as text.
    answer
        The column that is given to the reward as ``answer``.
    reward
        What scores a response; how it may be written is told by
        :class:`~laminar.environments.rewards.RewardFunction`. By default 1.0 if the response, or what stands in its
        last ``<answer>…</answer>``, is exactly the answer, else 0.0.

    Raises
    ------
    UserError
        The file's kind is unknown, or the reward function cannot be called. What is wrong inside of the file is
        told by ``check``.

    Example
    -------
    >>> import json, tempfile
    >>> path = Path(tempfile.mkdtemp()) / "sums.jsonl"
    >>> _ = path.write_text(json.dumps({"question": "2+3=", "answer": 5}))
    >>> sums = dataset(path, prompt="question")
    >>> sums.prompt(0).text, sums.score(sums.prompt(0), "5").reward
    ('2+3=', 1.0)
    """
    return Dataset(path_or_url, prompt=prompt, answer=answer, reward=reward)


class Dataset(Environment):
    """A file of prompts with a reward function; made by :func:`dataset`."""

    def __init__(self, path_or_url: str | Path, *, prompt: str, answer: str, reward: Callable[..., object]) -> None:
        self.url = _absolute(path_or_url)
        self.name = PurePosixPath(self.url).stem
        self.columns = {"prompt": prompt, "answer": answer}
        self.reward = RewardFunction(reward, answer=answer)
        self._records: Records | None = None

    def __len__(self) -> int:
        return len(self._read().rows)

    def prompt(self, index: int) -> Prompt:
        """Row ``index`` of the file, its id the file's name and the index."""
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of `{self.name}`, which has {len(self)}")
        row = self._read().rows[index]
        return Prompt(id=f"{self.name}-{index}", text=row[self.columns["prompt"]], row=dict(row))

    def score(self, prompt: Prompt, response: str) -> Score:
        return self.reward(response, prompt)

    @property
    def scored_by(self) -> str:
        return self.reward.label

    def trial_responses(self, prompt: Prompt) -> list[str]:
        answer = prompt.row.get(self.columns["answer"])
        return ["no answer"] if answer is None else [str(answer), "no answer"]

    def fingerprint(self) -> str:
        """Over the file's bytes, the columns, and the code of the reward function; not where the file is."""
        return fingerprint(self._read().digest, self.columns, self.reward.function)

    def check(self, deadline: float = 10.0) -> None:
        self._read()
        super().check(deadline)

    def _read(self) -> Records:
        """The file's rows, checked against the columns asked for; a UserError says what does not fit."""
        if self._records is None:
            records = read_records(self.url)
            self._check_columns(records.columns)
            _check_prompts(self.url, self.columns["prompt"], records.rows)
            self.reward.check_parameters(records.columns)
            self._records = records
        return self._records

    def _check_columns(self, columns: tuple[str, ...]) -> None:
        roles = ["prompt", "answer"] if self.reward.uses_answer else ["prompt"]
        for role in roles:
            name = self.columns[role]
            if name not in columns:
                others = [column for column in columns if column not in self.columns.values()]
                raise UserError(
                    f"data set {self.url} has no column '{name}'; it has {listed(columns)}{_advice(role, name, others)}"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_records": None}


def _absolute(path_or_url: str | Path) -> str:
    """A URL as it is, a path from the root: other processes may stand in another folder."""
    url = str(path_or_url)
    if "://" not in url and "::" not in url:
        url = str(Path(url).expanduser().absolute())
    if PurePosixPath(url).suffix not in SUFFIXES:
        raise UserError(f"data set {path_or_url}: expected a file that ends with one of {', '.join(SUFFIXES)}")
    return url


def _advice(role: str, name: str, columns: Iterable[str]) -> str:
    """Which column to take for a role: one with a similar name, or else one that usually has it.

    Example
    -------
    >>> _advice("prompt", "prompt", ["question", "id"])
    '; say which one to use: prompt="question"'
    """
    columns = list(columns)
    usual = next((column for column in _USUAL[role] if column in columns), None)
    return f'; say which one to use: {role}="{nearest(name, columns) or usual or "..."}"'


def _check_prompts(url: str, column: str, rows: Iterable[dict[str, Any]]) -> None:
    """Raise a UserError at the first row whose prompt is not text."""
    for number, row in enumerate(rows, start=1):
        value = row[column]
        if not isinstance(value, str):
            kind = "nothing" if value is None else f"a {type(value).__name__}"
            raise UserError(
                f"data set {url}, row {number}: column '{column}' holds {kind}; expected the prompt as text"
            )
        if not value.strip():
            raise UserError(f"data set {url}, row {number}: column '{column}' is empty; expected the prompt as text")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"data set {url}, row {number}: column '{column}' has half a character ({value[error.start]!r} at "
                f"{error.start}); expected the prompt as text"
            ) from error
