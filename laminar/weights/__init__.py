"""A host's weight versions in shared memory: written once by the trainer, proven by the relay, mapped by replicas.

``layout`` (where each tensor lies), ``segment`` (the files), ``owner`` (the relay's half), ``publisher`` (the
trainer's), ``reader`` (the replicas'), ``tensors`` (bytes and digests of tensors). Only ``publisher`` and ``tensors``
load torch, so nothing is imported from here.
"""
