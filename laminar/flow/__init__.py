"""Flows: a function whose calls make a Dask graph, whose signature is a command line, and whose runs are kept.

From writing a flow down to its result: ``flow`` and ``task`` (the decorators), ``parameters`` (signature to values),
``trace`` (calls to nodes), ``plan`` (all that is known before a start), ``run`` (start, watch), ``work`` (what the
nodes do on a worker), ``finish`` (record, summary, report), ``kept`` (results of tasks for the next run), ``store``
and ``results`` (a run's files), ``resume``.
Import what you need from the module that has it.
"""
