"""The run store: ``<store>/<flow>/<run id>/`` on any fsspec URL, and the small files in it."""

from __future__ import annotations

import json
import posixpath
import secrets
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
    fs.pipe_file(partial, data)
    Path(partial).replace(path)


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
            taken = folder.read_json("run.json") is not None
            if not taken:
                folder.write_json("run.json", record)
        except Exception as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"the run store {context.store} cannot be written: {reason}; give another with --store"
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
        """What a file says; None where there is none."""
        data = read_bytes(self.path(name))
        return None if data is None else dict(json.loads(data))

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

    Raises
    ------
    UserError
        The store cannot be read.
    """
    store = absolute(store)
    try:
        fs, path = fsspec.core.url_to_fs(store)
        files = fs.glob(f"{path}/*/*/run.json")
        folders = [RunFolder(f"{store}/{'/'.join(file.split('/')[-3:-1])}") for file in files]
        records = [(record, folder.url) for folder in folders if (record := folder.read_json("run.json"))]
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"the run store {store} cannot be read: {error}") from error
    runs = [{**record, "url": url} for record, url in records]
    return sorted(runs, key=lambda record: str(record["started"]))


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
        if RunFolder(url).read_json("run.json") is None:
            raise UserError(f"{run} is not a run's folder: it has no run.json")
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
