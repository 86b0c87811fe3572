"""Going on with a run that was stopped, failed or lost: the same flow, parameters and folder, on a fresh cluster.

Everything that counts is in the run's folder: the checkpoint that the trainer goes on from, the rows and partial
responses of the table, and the order of the prompts, which follows from the seed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from laminar.errors import UserError
from laminar.flow.context import RunContext
from laminar.flow.load import load_flow
from laminar.flow.plan import plan
from laminar.flow.record import is_here, record_of
from laminar.flow.results import status_of
from laminar.flow.run import Prepared
from laminar.flow.store import RunFolder, find_run

__all__ = ["prepare_resume"]


def prepare_resume(run: str, *, store: str = "runs", lost: bool = False) -> Prepared | dict[str, Any]:
    """Everything before the first process starts.

    Parameters
    ----------
    run
        Its id or the beginning of it, ``latest``, or its folder.
    lost
        The user's word that a run on another machine, of which nothing can be seen from here, is gone.

    Returns
    -------
    The prepared run, or the summary of one that is finished already: there is nothing to do then.

    Raises
    ------
    UserError
        There is no such run, it is still going on, or its flow's file is not there or has changed its parameters.
    """
    began = time.monotonic()
    folder = RunFolder(find_run(run, store))
    record = folder.record()
    status = status_of(record)
    if status == "finished":
        return {**record, **(folder.read_json("summary.json") or {}), "url": folder.url}
    if status == "running" and not (lost and not is_here(record)):
        raise UserError(_still_running(record))
    if not Path(record["file"]).is_file():
        raise UserError(
            f"run {record['run_id']} was started from {record['file']}, which is not there any more; a run goes on "
            "from its flow's file: put it back"
        )
    flow = load_flow(f"{record['file']}:{record['flow']}")
    context = RunContext(run_id=record["run_id"], store=folder.url.rsplit("/", 2)[0], url=folder.url)
    planned = plan(flow, record["parameters"], store=context.store, run_id=context.run_id)
    planned.check()
    if folder.read_json("run.json") != record:
        raise UserError(f"run {record['run_id']} was resumed by somebody else just now; look with laminar-flow ls")
    resumed = int(record.get("resumed", 0)) + 1
    folder.update_json("run.json", {**record_of(planned), "started": record["started"], "resumed": resumed})
    return Prepared(planned, folder, began)


def _still_running(record: dict[str, Any]) -> str:
    where = f"process {record['pid']} on {record['host']}"
    if is_here(record):
        return f"run {record['run_id']} is still going on ({where}); stop it before resuming"
    return (
        f"run {record['run_id']} has not said that it ended ({where}); stop it there or, if that machine is gone, "
        "resume with --lost"
    )
