"""A flow's parameters, read from its function's signature: the command line's options and Python's keywords.

The same types and the same checks wherever a value comes from: ``--steps 10``, ``run(steps=10)``, a file.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from laminar.errors import UserError
from laminar.flow.docstring import parameter_help
from laminar.suggest import nearest

__all__ = ["RESERVED", "Parameter", "parameters_of", "resolve"]

RESERVED = ("help", "json", "output", "params", "quiet", "run_id", "scheduler", "store", "version")
"""Names that the commands and ``Flow.run`` use themselves."""

_SCALARS = {int: "int", float: "float", bool: "bool", str: "str", Path: "path"}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a flow.

    Parameters
    ----------
    annotation
        ``int``, ``float``, ``bool``, ``str``, ``Path``, ``Literal`` or one of them ``| None``; ``Annotated``
        with pydantic's constraints too.
    default
        ``inspect.Parameter.empty`` where a value must be given.
    """

    name: str
    annotation: Any
    default: Any = inspect.Parameter.empty
    help: str = ""

    @property
    def required(self) -> bool:
        """Whether a value must be given."""
        return self.default is inspect.Parameter.empty

    @property
    def option(self) -> str:
        """Its name on the command line.

        >>> Parameter("group_size", int).option
        '--group-size'
        """
        return "--" + self.name.replace("_", "-")

    @cached_property
    def type_name(self) -> str:
        """Its type for people.

        >>> Parameter("x", int | None).type_name, Parameter("x", Literal["a", "b"]).type_name
        ('int or none', 'a|b')
        """
        name = _type_name(self._base)
        return f"{name} or none" if self._optional else name

    @property
    def is_flag(self) -> bool:
        """Whether it is on or off: ``--x`` and ``--no-x``."""
        return self._base is bool

    def convert(self, value: Any) -> Any:
        """A value as the function wants it.

        Raises
        ------
        UserError
            It is not of the type.

        Example
        -------
        >>> Parameter("lr", float).convert("3e-4"), Parameter("lr", float).convert(1)
        (0.0003, 1.0)
        >>> Parameter("steps", int).convert("ten")
        Traceback (most recent call last):
        laminar.errors.UserError: parameter `steps` is 'ten'; expected int
        """
        expected = f"parameter `{self.name}` is {value!r}; expected {self.type_name}"
        if isinstance(value, bool) and self._base in (int, float):  # True is 1 to pydantic, and a slip to us
            raise UserError(expected)
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            raise UserError(expected + _constraint(error)) from None

    def from_text(self, text: str) -> Any:
        """A value typed on the command line: ``none`` is None, and a choice is found by its text.

        >>> Parameter("ceiling", int | None).from_text("none"), Parameter("n", Literal[1, 2]).from_text("2")
        (None, 2)
        """
        if self._optional and text.lower() == "none":
            return None
        choices = get_args(self._base) if get_origin(self._base) is Literal else ()
        return self.convert(next((choice for choice in choices if str(choice) == text), text))

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.annotation)

    @property
    def _optional(self) -> bool:
        return type(None) in _members(self.annotation)

    @property
    def _base(self) -> Any:
        """The type without ``Annotated`` and ``| None``; None where there is not exactly one."""
        members = [member for member in _members(self.annotation) if member is not type(None)]
        return _bare(members[0]) if len(members) == 1 else None


def parameters_of(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """The parameters of a flow's function, in its order.

    Raises
    ------
    UserError
        One has a type that an option cannot have, no type at all, or a reserved name.

    Example
    -------
    >>> def flow(steps: int = 40, replicas: int | None = None): "Train."
    >>> [(p.name, p.type_name, p.default) for p in parameters_of(flow)]
    [('steps', 'int', 40), ('replicas', 'int or none', None)]
    """
    signature = inspect.signature(function)
    texts = parameter_help(function.__doc__, signature.parameters)
    return tuple(
        _parameter(function, parameter, texts.get(parameter.name, "")) for parameter in signature.parameters.values()
    )


def resolve(owner: str, parameters: Sequence[Parameter], values: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter's value: the given one, or the default, each converted.

    Raises
    ------
    UserError
        A name that does not exist (the nearest one is named), a value of the wrong type, or one missing.

    Example
    -------
    >>> steps, lr = Parameter("steps", int, 40), Parameter("lr", float, 1)
    >>> resolve("quickstart", [steps, lr], {"steps": "10"})
    {'steps': 10, 'lr': 1.0}
    >>> resolve("demo", [steps, lr], {"step": 10})
    Traceback (most recent call last):
    laminar.errors.UserError: flow `demo` has no parameter `step`; did you mean `steps`? It has: steps, lr
    """
    names = [parameter.name for parameter in parameters]
    for name in values:
        if name not in names:
            raise UserError(f"flow `{owner}` has no parameter `{name}`; {_offer(name, names)}")
    missing = [parameter for parameter in parameters if parameter.required and parameter.name not in values]
    if missing:
        wanted = ", ".join(f"{parameter.option} ({parameter.type_name})" for parameter in missing)
        raise UserError(f"flow `{owner}` needs a value for {wanted}")
    return {
        parameter.name: parameter.convert(values.get(parameter.name, parameter.default)) for parameter in parameters
    }


def _offer(name: str, names: Sequence[str]) -> str:
    close = nearest(name, names)
    hint = f"did you mean `{close}`? " if close else ""
    return f"{hint}It has: {', '.join(names)}" if names else "it has none"


def _constraint(error: ValidationError) -> str:
    """What a value of the right type lacks; nothing where the type is wrong."""
    told = [fault["msg"] for fault in error.errors() if not fault["type"].endswith(("_type", "_parsing", "_required"))]
    return f" ({told[0]})" if told and "expected" not in error.errors()[0].get("ctx", {}) else ""


def _parameter(function: Callable[..., Any], parameter: inspect.Parameter, text: str) -> Parameter:
    where = f"parameter `{parameter.name}` of flow `{function.__name__}`"
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise UserError(f"{where} cannot be set by name: write it as an ordinary parameter with a type")
    if parameter.name in RESERVED:
        raise UserError(f"{where} has a reserved name ({', '.join(RESERVED)}); rename it")
    annotation = _annotation(function, parameter, where)
    if parameter.default is None and type(None) not in _members(annotation):
        annotation = Union[annotation, None]  # noqa: UP007 - built at run time
    built = Parameter(parameter.name, annotation, parameter.default, text)
    if _type_name(built._base) is None:
        raise UserError(f"{where} is a `{parameter.annotation}`; expected {_SUPPORTED}")
    return built


_SUPPORTED = "int, float, bool, str, Path, Literal, or one of them | None"


def _annotation(function: Callable[..., Any], parameter: inspect.Parameter, where: str) -> Any:
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        if type(parameter.default) not in _SCALARS:
            raise UserError(f"{where} has no type; write one: {_SUPPORTED}")
        return type(parameter.default)
    while isinstance(annotation, str):  # by `from __future__ import annotations`, in quotes, or both
        try:
            annotation = eval(annotation, function.__globals__)
        except (NameError, AttributeError, SyntaxError, TypeError) as error:
            raise UserError(f"{where} has the type `{annotation}`, which cannot be read: {error}") from error
    return annotation


def _members(annotation: Any) -> tuple[Any, ...]:
    bare = _bare(annotation)
    return get_args(bare) if get_origin(bare) in (Union, types.UnionType) else (bare,)


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _type_name(base: Any) -> Any:
    """The name of a supported type, None for any other."""
    if get_origin(base) is Literal:
        return "|".join(str(choice) for choice in get_args(base))
    return _SCALARS.get(base) if isinstance(base, type) else None
