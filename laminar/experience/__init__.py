"""The data module: prompt pool, partial-response pool and experience table.

``schema`` says what a trajectory's row is; ``index`` and ``samplers`` are the rules (pure); ``store``,
``segments`` and ``payloads`` keep the files; ``table`` glues them for the one process that owns the table;
``reader`` reads the files from any other. Import what you need from the module that has it.
"""
