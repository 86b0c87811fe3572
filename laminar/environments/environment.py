"""What every environment can do: give prompts by index, score one answer, prove that it works before a run starts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from laminar.environments.described import described
from laminar.environments.fingerprint import fingerprint
from laminar.environments.pickling import dumps_by_value, is_installed, revive
from laminar.errors import LaminarError, UserError
from laminar.trajectory import Prompt, Score

__all__ = ["Environment", "Prompts"]

T = TypeVar("T")


class Environment(ABC):
    """Prompts with a way to score answers to them.

    Cheap to make, and picklable also where the class or a reward function stands in a flow file or a notebook: such
    code travels by value. Subclasses give ``name``, ``__len__``, ``prompt`` and ``score``.

    Example
    -------
    >>> class Squares(Environment):
    ...     name = "squares"
    ...
    ...     def __len__(self):
    ...         return 10
    ...
    ...     def prompt(self, index):
    ...         return Prompt(id=f"squares-{index}", text=f"{index}*{index}=", row={"answer": index * index})
    ...
    ...     def score(self, prompt, response):
    ...         return Score(reward=float(response.strip() == str(prompt.row["answer"])))
    >>> squares = Squares()
    >>> squares.score(squares.prompt(3), "9").reward
    1.0
    """

    name: str

    @abstractmethod
    def __len__(self) -> int:
        """How many different prompts there are."""

    @abstractmethod
    def prompt(self, index: int) -> Prompt:
        """The prompt at ``0 <= index < len(self)``. The same index gives the same prompt, under an id of its own."""

    @abstractmethod
    def score(self, prompt: Prompt, response: str) -> Score:
        """Score one answer, in this process. May raise and may take long: a run calls it through a ``Scorer``."""

    def prepare(self) -> None:  # noqa: B027  a hook that most environments have no use for
        """Load what scoring needs. Called once in each process that scores, before any deadline runs."""

    @property
    def scored_by(self) -> str:
        """What messages call the code that scores, e.g. ``reward `my_reward```."""
        return f"environment `{self.name}`"

    def trial_responses(self, prompt: Prompt) -> Sequence[str]:
        """Answers on which ``check`` tries the scorer: the true one where the row has it, and a wrong one."""
        answer = prompt.row.get("answer")
        return ["no answer"] if answer is None else [str(answer), "no answer"]

    def __dask_tokenize__(self) -> str:
        return self.fingerprint()

    def fingerprint(self) -> str:
        """A hash of the prompts and of the code that scores, the same in every process.

        This one hashes the class's own code, its attributes, and up to 16 prompts spread over the whole.
        """
        count = len(self)
        indices = sorted({count * part // 16 for part in range(16)}) if count else []
        prompts = [(prompt.id, prompt.text, prompt.row) for prompt in map(self.prompt, indices)]
        return fingerprint(type(self), self.__getstate__(), count, prompts)

    def check(self, deadline: float = 10.0) -> None:
        """Find out before any model loads whether this environment can be used.

        Scores a true and a wrong answer to the first prompt in a process that is killed if it hangs.

        Parameters
        ----------
        deadline
            Longest that one score may take, in seconds.

        Raises
        ------
        UserError
            There is no prompt, it is none, or scoring raised, hung or returned what no reward can be.
        """
        from laminar.environments.scoring import Scorer

        prompt, responses = self._first()
        with Scorer(self, deadline=deadline) as scorer:
            for response in responses:
                score = scorer.score(prompt, response).result(timeout=scorer.longest)
                if score.status in ("error", "timeout"):
                    raise UserError(f"{score.message} (tried on {prompt.id} with the response {response[:80]!r})")

    def _first(self) -> tuple[Prompt, Sequence[str]]:
        """The first prompt and answers to it, or a UserError that says what is wrong with them."""
        if not isinstance(getattr(self, "name", None), str):
            raise UserError(f"environment class `{type(self).__name__}` has no name; give it one: name = 'my_problems'")
        if self._asked("len()", lambda: len(self)) == 0:
            raise UserError(f"environment `{self.name}` has no prompts; expected at least one")
        prompt = self._asked("prompt(0)", lambda: self.prompt(0))
        if not isinstance(prompt, Prompt):
            raise UserError(f"environment `{self.name}`: prompt(0) is a {type(prompt).__name__}; expected a Prompt")
        for name, kind in (("id", str), ("text", str), ("row", dict)):
            value = getattr(prompt, name)
            if not isinstance(value, kind):
                given, wanted = type(value).__name__, kind.__name__
                raise UserError(f"environment `{self.name}`: prompt(0).{name} is a {given}; expected a {wanted}")
        return prompt, self._asked("trial_responses()", lambda: self.trial_responses(prompt))

    def _asked(self, what: str, call: Callable[[], T]) -> T:
        """What a method of the user's own class gives; a UserError where it raises."""
        try:
            return call()
        except LaminarError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(f"environment `{self.name}`: {what} raised {described(error)}") from error

    def __getstate__(self) -> dict[str, Any]:
        """The attributes that make this environment; what was computed from them stays behind."""
        return dict(self.__dict__)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if is_installed(type(self).__module__):
            return super().__reduce_ex__(protocol)
        return revive, (dumps_by_value((type(self), self.__getstate__()), owner=type(self)),)


Prompts = Environment
