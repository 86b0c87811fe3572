"""The run store: ``<store>/<flow>/<run id>/`` on any fsspec URL, and the small files in it."""

from __future__ import annotations

import json
import posixpath
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from laminar.errors import UserError
from laminar.flow.context import RunContext
from laminar.flow.plain import as_plain

__all__ = ["RunFolder", "absolute", "find_run", "list_runs", "read_bytes", "write_bytes"]


def absolute(store: str | Path) -> str:
    """A store's URL that means the same in every process: a local path from the root, no slash at the end.

    Example
    -------
    >>> absolute("s3://lab/runs/"), absolute("/data/runs/")
    ('s3://lab/runs', '/data/runs')
    """
    url = str(store)
    return (url if "://" in url else str(Path(url).expanduser().resolve())).rstrip("/")


def read_bytes(url: str) -> bytes | None:
    """A file's contents; None where there is no such file."""
    fs, path = fsspec.core.url_to_fs(url)
    try:
        return bytes(fs.cat_file(path))
    except FileNotFoundError:
        return None


def write_bytes(url: str, data: bytes) -> None:
    """Write a file, in its folder or a new one, that nobody ever sees half written."""
    fs, path = fsspec.core.url_to_fs(url)
    fs.makedirs(posixpath.dirname(path), exist_ok=True)
    if not isinstance(fs, LocalFileSystem):  # an object appears whole or not at all
        fs.pipe_file(path, data)
        return
    partial = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        fs.pipe_file(partial, data)
        Path(partial).replace(path)
    except BaseException:  # a full disk, or Ctrl-C
        Path(partial).unlink(missing_ok=True)
        raise


_KEYS = {"run_id", "flow", "status", "started", "parameters"}
"""What every ``run.json`` has."""


class RunFolder:
    """A run's folder and the JSON files in it.

    Parameters
    ----------
    url
        The folder, any fsspec URL. Nothing is looked at or made before the first call.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    @classmethod
    def create(cls, context: RunContext, record: dict[str, Any]) -> RunFolder:
        """Make a run's folder with its ``run.json``.

        Raises
        ------
        UserError
            The store cannot be written, or has a run of that id already.
        """
        folder = cls(context.url)
        try:
            taken = not _claimed(context.url)
            if not taken:
                folder.write_json("run.json", record)
        except Exception as error:
            _give_back(context.url)
            raise UserError(
                f"the run store {context.store} cannot be written: {_reason(error)}; give another with --store"
            ) from error
        if taken:
            raise UserError(f"there is a run {context.run_id} already: {context.url}; give another --run-id")
        return folder

    def path(self, name: str) -> str:
        """URL of a file in the folder."""
        return f"{self.url}/{name}"

    def write_json(self, name: str, value: Any) -> None:
        """Write a file whole or not at all; what JSON has not becomes None or text (``as_plain``)."""
        write_bytes(self.path(name), (json.dumps(as_plain(value), indent=2) + "\n").encode())

    def read_json(self, name: str) -> dict[str, Any] | None:
        """What a file says; None where there is none.

        Raises
        ------
        UserError
            It cannot be read, or is no JSON object.
        """
        try:
            data = read_bytes(self.path(name))
            value = None if data is None else json.loads(data)
        except Exception as error:  # drivers of remote stores raise errors of their own kinds
            raise UserError(f"{self.path(name)} cannot be read: {_reason(error)}") from error
        if not (value is None or isinstance(value, dict)):
            raise UserError(
                f"{self.path(name)} is a {type(value).__name__}; expected the JSON object that a run writes"
            )
        return value

    def record(self) -> dict[str, Any]:
        """What ``run.json`` says.

        Raises
        ------
        UserError
            There is none, or it is not what a run writes.
        """
        record = self.read_json("run.json")
        if record is None:
            raise UserError(f"{self.url} is not a run's folder: it has no run.json")
        if missing := sorted(_KEYS - record.keys()):
            raise UserError(f"{self.path('run.json')} lacks {', '.join(missing)}; expected what a run writes")
        return record

    def update_json(self, name: str, values: dict[str, Any]) -> None:
        """Set some names of a file and keep the others."""
        self.write_json(name, {**(self.read_json(name) or {}), **values})

    def update_summary(self, values: dict[str, Any]) -> None:
        """Add the numbers of a stage to what the run ends with (``summary.json``)."""
        self.update_json("summary.json", values)

    def write_text(self, name: str, text: str) -> str:
        """Write a text file; its URL."""
        write_bytes(self.path(name), text.encode())
        return self.path(name)


def list_runs(store: str) -> list[dict[str, Any]]:
    """``run.json`` of every run in a store, with its ``url``, the oldest first.

    One that cannot be read hides no other: it comes first of all, with the status ``damaged``.

    Raises
    ------
    UserError
        The store cannot be read.
    """
    store = absolute(store)
    try:
        fs, path = fsspec.core.url_to_fs(store)
        files = fs.glob(f"{path}/*/*/run.json")
    except Exception as error:  # drivers of remote stores raise errors of their own kinds
        raise UserError(f"the run store {store} cannot be read: {_reason(error)}") from error
    runs = [_record(f"{store}/{'/'.join(file.split('/')[-3:-1])}") for file in files]
    return sorted(runs, key=lambda record: str(record["started"]))


def _record(url: str) -> dict[str, Any]:
    """What a run's folder says of it."""
    try:
        return {**RunFolder(url).record(), "url": url}
    except UserError as error:
        flow, run_id = url.split("/")[-2:]
        return {"run_id": run_id, "flow": flow, "started": "", "status": "damaged", "error": str(error), "url": url}


def _claimed(url: str) -> bool:
    """Make a run's folder; False where somebody has it already. On a local disk only one of several gets it."""
    fs, path = fsspec.core.url_to_fs(url)
    if not isinstance(fs, LocalFileSystem):
        return not fs.exists(f"{path}/run.json")
    fs.makedirs(posixpath.dirname(path), exist_ok=True)
    try:
        Path(path).mkdir()
    except FileExistsError:
        return False
    return True


def _give_back(url: str) -> None:
    """Remove a run's folder that nothing could be written to; what is not there or not empty stays as it is."""
    if "://" not in url:
        with suppress(OSError):
            Path(url).rmdir()


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__


def find_run(run: str, store: str = "runs") -> str:
    """The folder's URL of a run.

    Parameters
    ----------
    run
        A run id or the beginning of one, ``latest``, or the folder's path or URL.

    Raises
    ------
    UserError
        No run is meant, or more than one.
    """
    if "/" in run or (Path(run) / "run.json").is_file():
        url = absolute(run)
        RunFolder(url).record()
        return url
    runs = list_runs(store)
    ids = [record["run_id"] for record in runs]
    if not runs:
        raise UserError(f"there is no run in the store {absolute(store)}; give another with --store")
    if run == "latest":
        return str(runs[-1]["url"])
    found = [record for record in runs if record["run_id"] == run]
    found = found or [record for record in runs if record["run_id"].startswith(run)]
    if len(found) != 1:
        what = "no run" if not found else f"{len(found)} runs"
        newest = ", ".join(ids[:-6:-1])
        raise UserError(f"{what} in {absolute(store)} begins with {run!r}; the newest are {newest}")
    return str(found[0]["url"])
