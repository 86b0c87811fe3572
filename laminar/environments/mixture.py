"""Several environments as one, each with its share of the draws."""

from __future__ import annotations

from collections.abc import Sequence

from laminar.environments.environment import Environment
from laminar.environments.fingerprint import fingerprint
from laminar.errors import UserError
from laminar.trajectory import Prompt, Score

__all__ = ["Mixture", "mix"]


class Mixture(Environment):
    """Environments one after another; prompts are drawn from each by its weight.

    Attributes
    ----------
    parts
        Pairs of an environment and its weight.
    """

    def __init__(self, parts: Sequence[tuple[Environment, float]]) -> None:
        self.parts = [(environment, float(weight)) for environment, weight in parts]
        self.name = "+".join(environment.name for environment, _ in self.parts)

    def __len__(self) -> int:
        return sum(len(environment) for environment, _ in self.parts)

    def prompt(self, index: int) -> Prompt:
        """The prompt of the part that the index falls into, under an id that names its place in the mixture."""
        for place, (environment, _) in enumerate(self.parts):
            if index < len(environment):
                prompt = environment.prompt(index)
                return Prompt(f"{place}:{prompt.id}", prompt.text, {"part": place, "row": prompt.row})
            index -= len(environment)
        raise IndexError(f"`{self.name}` has {len(self)} prompts")

    def score(self, prompt: Prompt, response: str) -> Score:
        """What the prompt's own environment says."""
        environment, own = self._own(prompt)
        return environment.score(own, response)

    def prepare(self) -> None:
        """Load what scoring needs, of every part."""
        for environment, _ in self.parts:
            environment.prepare()

    def trial_responses(self, prompt: Prompt) -> Sequence[str]:
        """Those of the prompt's own environment."""
        environment, own = self._own(prompt)
        return environment.trial_responses(own)

    def fingerprint(self) -> str:
        """A hash of the parts' and of their weights."""
        return fingerprint([(environment.fingerprint(), weight) for environment, weight in self.parts])

    def check(self, deadline: float = 10.0) -> None:
        """Each part's own check."""
        for environment, _ in self.parts:
            environment.check(deadline)

    def _own(self, prompt: Prompt) -> tuple[Environment, Prompt]:
        environment, _ = self.parts[prompt.row["part"]]
        return environment, Prompt(prompt.id.partition(":")[2], prompt.text, prompt.row["row"])


def mix(*parts: tuple[Environment, float]) -> Mixture:
    """One environment of several: ``lm.mix((sums, 3), (words, 1))`` draws three of four prompts from ``sums``.

    Each part is gone through in an order and in epochs of its own, so a small one is repeated more often.

    Raises
    ------
    UserError
        No parts, or a weight that is not above 0.
    """
    if not parts:
        raise UserError("mix: no environments given; give pairs of an environment and its weight")
    for part in parts:
        if not (isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], Environment)):
            raise UserError(f"mix: {part!r} given; expected a pair of an environment and its weight")
        if not part[1] > 0:
            raise UserError(f"mix: the weight of `{part[0].name}` is {part[1]}; expected more than 0")
    return Mixture(parts)
