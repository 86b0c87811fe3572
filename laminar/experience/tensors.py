"""A leased table's tokens as flat torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    import torch

__all__ = ["tensors"]

_COLUMNS = ("prompt_ids", "response_ids", "logprobs", "loss_mask")


def tensors(table: pa.Table) -> dict[str, torch.Tensor]:
    """Token columns one row after another, and where each row begins; nothing is copied.

    Returns
    -------
    For each of ``prompt_ids``, ``response_ids``, ``logprobs`` and ``loss_mask`` its values (1-d, all rows), and under
    ``<column>_offsets`` (1-d, rows + 1) their bounds: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``. They share
    memory with the table: do not write to them.

    Example
    -------
    >>> table = pa.table({name: [[1, 2], [3]] for name in _COLUMNS})
    >>> found = tensors(table)
    >>> found["response_ids"].tolist(), found["response_ids_offsets"].tolist()
    ([1, 2, 3], [0, 2, 3])
    """
    import torch
    import torch.utils.dlpack

    found: dict[str, torch.Tensor] = {}
    for name in _COLUMNS:
        column = table.column(name)
        rows = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        offsets = rows.offsets.to_numpy()
        found[name] = torch.utils.dlpack.from_dlpack(rows.values.slice(offsets[0], offsets[-1] - offsets[0]))
        found[f"{name}_offsets"] = torch.from_numpy(offsets - offsets[0])
    return found
