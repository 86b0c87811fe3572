"""The data module: prompt pool, partial-response pool and experience table.

``schema`` says what a trajectory's row is. The rules are pure: ``facts`` and ``index`` (what is ready, what may
happen to it), ``samplers`` and ``evictors`` (what is trained on next, and what never), ``segment_files`` (which files
count). ``store``, ``segments``, ``life``, ``payloads`` and ``compaction`` keep the files, ``epochs`` says who may write
them; ``table`` glues all that for the one process that owns the table. ``reader`` reads the files from any other.
Import what you need from the module that has it.
"""
