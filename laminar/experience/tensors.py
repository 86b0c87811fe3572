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
    from torch.utils.dlpack import from_dlpack

    found: dict[str, torch.Tensor] = {}
    for name in _COLUMNS:
        column = table.column(name)
        rows = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        first, end = rows.offsets[0].as_py(), rows.offsets[-1].as_py()
        offsets = from_dlpack(rows.offsets)
        found[name] = from_dlpack(rows.values.slice(first, end - first))
        found[f"{name}_offsets"] = offsets - first if first else offsets
    return found
