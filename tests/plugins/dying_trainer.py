"""A trainer that is killed, with a real SIGKILL, at given moments of its work."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from laminar_dask.trainer import Trainer, TrainerSettings

__all__ = ["MOMENTS", "DyingTrainer"]

MOMENTS = (
    "before the lease",
    "after the lease",
    "in the step",
    "before publishing",
    "before the commit",
    "after the commit",
    "while saving",
    "after saving",
    "after the start",
)


class DyingTrainer(Trainer):
    """Each life ends at the next of the moments; when there is none left it lives on.

    Parameters
    ----------
    left
        A file with the moments that are left, a line each.
    """

    def __init__(self, settings: TrainerSettings, left: Path) -> None:
        super().__init__(settings)
        self.left = left

    def die(self, moment: str) -> None:
        """Die if it is time."""
        left = self.left.read_text().splitlines()
        if left and left[0] == moment:
            self.left.write_text("\n".join(left[1:]))
            os.kill(os.getpid(), signal.SIGKILL)

    async def _start(self) -> None:
        await super()._start()
        self.die("after the start")
        self._learner._optimizer.register_step_pre_hook(lambda *_: self.die("in the step"))
        publish, model = self._publication.publish, self._learner.model
        save_pretrained = model.save_pretrained

        async def publish_or_die(version: int) -> bool:
            self.die("before publishing")
            return await publish(version)

        def save_or_die(folder: Path) -> None:
            save_pretrained(folder)
            self.die("while saving")

        self._publication.publish = publish_or_die  # type: ignore[method-assign]
        model.save_pretrained = save_or_die

    async def _lease(self, groups: int, poll: float) -> dict[str, Any]:
        self.die("before the lease")
        lease = await super()._lease(groups, poll)
        self.die("after the lease")
        return lease

    async def _commit(self) -> None:
        stepped = self._uncommitted is not None
        if stepped:
            self.die("before the commit")
        await super()._commit()
        if stepped:
            self.die("after the commit")

    async def _save(self, final: bool) -> str:
        url = await super()._save(final)
        self.die("after saving")
        return url
