"""The scheduler's half of the relays: owns the plans of the chains, and tells relays what to send to whom.

What is decided stands in ``laminar.weights.keeper``; here it is told of joins, deaths and reports, and its orders
are carried out.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any

from distributed import Scheduler, SchedulerPlugin

from laminar.weights.chain import Member, Plan, Root
from laminar.weights.keeper import Keeper, Send, StandInSend, Survey
from laminar_dask._compat import in_background, workers_of
from laminar_dask.waiting import within

__all__ = ["ChainPlugin"]

logger = logging.getLogger(__name__)

CALL_DEADLINE = 5.0
"""Seconds for a relay to take an order."""
SURVEY_DEADLINE = 0.5
"""Seconds for a relay to say what it holds: one that is frozen must not hold up the others for long."""
STUCK_SECONDS = 10.0
"""A chain of which nobody reports anything, and no relay takes a byte, for so long is planned anew."""
LOOK_SECONDS = 1.0


class ChainPlugin(SchedulerPlugin):
    """RPC:

    - ``laminar_chain_join(relay, host, address, version, nbytes)``: a relay's data plane is up.
    - ``laminar_chain_published(relay, version, nbytes)``: a relay has a new version from its trainer.
    - ``laminar_chain_handed_over(relay, version, nbytes, shard)``: a relay has one part of it from a shard.
    - ``laminar_chain_relay(host)``: address of the relay of a host, or None.
    - ``laminar_chain_token()``: what the relays of this scheduler know each other by, on their own connections.
    - ``laminar_chain_status()``: members, newest version, chain under way, repairs.
    - ``laminar_chain_rows()``: one row of metrics a relay.

    Stream: ``laminar-chain-report``, what relays say of their chains.
    """

    name = "laminar-chain"
    idempotent = True

    def __init__(self) -> None:
        self.keeper = Keeper()
        self.secret = ""

    async def start(self, scheduler: Scheduler) -> None:
        """Register the handlers."""
        self.scheduler = scheduler
        self.secret = secrets.token_hex(16)
        self._tasks: set[asyncio.Task[None]] = set()
        self._moved: tuple[Any, float] = (None, 0.0)
        scheduler.handlers["laminar_chain_join"] = self.join
        scheduler.handlers["laminar_chain_published"] = self.published
        scheduler.handlers["laminar_chain_handed_over"] = self.handed_over
        scheduler.handlers["laminar_chain_relay"] = self.relay_of
        scheduler.handlers["laminar_chain_token"] = self.token
        scheduler.handlers["laminar_chain_status"] = self.status
        scheduler.handlers["laminar_chain_rows"] = self.rows
        scheduler.stream_handlers["laminar-chain-report"] = self.report
        self._spawn(self._look())

    async def close(self) -> None:
        """Stop looking."""
        for task in list(self._tasks):
            task.cancel()

    def join(self, relay: str, host: str, address: str, version: int | None, nbytes: int) -> str:
        """RPC: a relay's data plane is up. Answers, so that a caller can tell that there is an owner of the chains."""
        self._follow(self.keeper.join(Member(relay, host, address), version, nbytes=nbytes))
        return "joined"

    def published(self, relay: str, version: int, nbytes: int) -> str:
        """RPC: a relay has a new version from its trainer."""
        self._follow(self.keeper.published(relay, version, nbytes=nbytes))
        return "planned"

    def handed_over(self, relay: str, version: int, nbytes: int, shard: dict[str, int]) -> str:
        """RPC: a relay has one part of a new version from a shard of its trainer."""
        self._follow(self.keeper.handed_over(version, Root(relay, **shard), nbytes=nbytes))
        return "noted"

    def relay_of(self, host: str) -> str | None:
        """RPC: the relay of a host."""
        return next((member.name for member in self.keeper.members.values() if member.host == host), None)

    def token(self) -> str:
        """RPC: what the relays of this scheduler know each other by."""
        return self.secret

    def status(self) -> dict[str, Any]:
        """RPC: what the chains are like."""
        flights = self.keeper.flights
        return {
            "relays": sorted(self.keeper.members),
            "newest": self.keeper.newest,
            "holders": {version: sorted(names) for version, names in self.keeper.holders.items() if names},
            "chains": [[member.name for member in plan.members] for plan in flights.values()],
            "version": next((plan.version for plan in flights.values()), None),
            "repairs": self.keeper.repairs,
        }

    def rows(self) -> list[dict[str, Any]]:
        """RPC: what each relay said of itself with its last heartbeat; ``lag`` is versions behind the newest of all."""
        found = []
        for name in self.keeper.members:
            worker = self.scheduler.workers.get(name)
            seen = dict(worker.metrics.get("laminar_relay", {})) if worker is not None else {}
            if seen:
                seen["held"] = len(seen["held"])
                newest, version = self.keeper.newest, seen["version"]
                if newest is not None and version is not None:
                    seen["lag"] = max(seen["lag"], newest - version)
                found.append({"name": str(worker.name), **seen})
        return found

    def report(self, worker: str, what: str, version: int, epoch: int, member: str = "", why: str = "") -> None:
        """Stream: something happened on a chain."""
        self._moved = (None, 0.0)
        if what in ("lost", "failed", "skipped", "starving", "damaged"):
            logger.info("version %d at %s: %s %s %s", version, worker, what, member, why)
            self.scheduler.log_event(
                "laminar",
                {"action": f"relay-{what}", "relay": worker, "version": version, "member": member, "why": why},
            )
        self._follow(self.keeper.report(worker, what, version=version, epoch=epoch, member=member))

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """A relay's process has gone."""
        self._follow(self.keeper.leave(worker))

    # -- orders -------------------------------------------------------------------------------------------

    def _follow(self, orders: list[Any]) -> None:
        for order in orders:
            if isinstance(order, Survey):
                self._spawn(self._survey(order))
            elif isinstance(order, StandInSend):
                self._spawn(self._stand_in(order))
            else:
                self._spawn(self._send(order))

    def _spawn(self, work: Any) -> None:
        async def start() -> None:
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        in_background(self.scheduler, start)

    async def _send(self, order: Send) -> None:
        await self._order(order.relay, "laminar_relay_send", order.plan)

    async def _stand_in(self, order: StandInSend) -> None:
        trainer = await self._stand_in_of(order.plan.version, order.host)
        if trainer is None:
            self._follow(self.keeper.report(order.plan.members[0].name, "failed", **_of(order.plan)))
            return
        await self._order(trainer.name, "laminar_relay_stand_in", order.plan)

    async def _order(self, address: str, call: str, plan: Plan) -> None:
        """Have a relay send a plan; one that cannot counts as failed."""
        try:
            answer = await self._ask(address, call, CALL_DEADLINE, plan=plan.to_dict())
        except (OSError, TimeoutError, LookupError) as error:
            answer = f"{type(error).__name__}: {error}"
        if answer != "sending":
            logger.warning("relay %s does not send version %d: %s", address, plan.version, answer)
            self._follow(self.keeper.report(plan.members[0].name, "failed", **_of(plan)))

    async def _survey(self, order: Survey) -> None:
        async def held(relay: str) -> int | None:
            try:
                asked = {"version": order.version, "part": order.part}
                answer = await self._ask(relay, "laminar_relay_held", SURVEY_DEADLINE, **asked)
            except (OSError, TimeoutError):
                return None  # dead or frozen: the chain goes on without it
            return None if answer is None else int(answer)

        answers = await asyncio.gather(*(held(relay) for relay in order.relays))
        holdings = {relay: n for relay, n in zip(order.relays, answers, strict=True) if n is not None}
        stand_in = await self._stand_in_of(order.version, order.host)
        self._follow(self.keeper.surveyed(order.version, holdings, stand_in, part=order.part))

    async def _stand_in_of(self, version: int, host: str) -> Member | None:
        """The trainer's process that can send what the dead relay of its host left."""
        for address in workers_of(self.scheduler, "trainer"):
            try:
                found = await self._ask(address, "laminar_relay_can_stand_in", SURVEY_DEADLINE, version=version)
            except (OSError, TimeoutError):
                continue
            if found:
                return Member(address, host, "")
        return None

    async def _ask(self, address: str, call: str, deadline: float, **arguments: Any) -> Any:
        return await within(deadline, getattr(self.scheduler.rpc(address), call)(**arguments))

    async def _look(self) -> None:
        """Plan a chain anew that neither reports nor moves."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            moved = [ws.metrics.get("laminar_relay", {}).get("bytes_in") for ws in self.scheduler.workers.values()]
            if moved != self._moved[0] or not (self.keeper.flights or self.keeper.behind):
                self._moved = (moved, loop.time())
            elif loop.time() - self._moved[1] > STUCK_SECONDS:
                self._moved = (None, 0.0)
                logger.warning("nothing has moved for %g s on the chain of %s", STUCK_SECONDS, self.keeper.flights)
                self._follow(self.keeper.stuck())


def _of(plan: Plan) -> dict[str, int]:
    return {"version": plan.version, "epoch": plan.epoch}
