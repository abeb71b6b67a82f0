"""Attention as text: a static pattern, or a kind such as `linformer(rank=256)`."""

import ast
import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformer_jax import patterns
from transformer_jax.attention.kinds import AttentionKind, Option
from transformer_jax.attention.table import ATTENTION
from transformer_jax.patterns import Pattern

# Its texts are patterns.
SOFTMAX = "dot_product"


@dataclasses.dataclass(frozen=True)
class Attention:
    """What a text says: a row of the ATTENTION table, with its settings.

    Attributes:
        kind: key of ATTENTION.
        pattern: of `dot_product`; None allows all.
        settings: (name, value) of every option of the kind.
    """

    kind: str = SOFTMAX
    pattern: Pattern | None = None
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def row(self) -> AttentionKind:
        """The row of the table."""
        return ATTENTION[self.kind]

    @property
    def options(self) -> Mapping[str, Any]:
        """Every option by name."""
        return MappingProxyType(dict(self.settings))

    def __str__(self) -> str:
        """Return the shortest text that `parse` turns into this."""
        if self.kind == SOFTMAX:
            return "full()" if self.pattern is None else str(self.pattern)
        defaults = self.row.options
        said = [f"{k}={v}" for k, v in self.settings if v != defaults[k].default]
        return f"{self.kind}({', '.join(said)})"


def parse(text: str) -> Attention:
    """Return what a text describes; the inverse of `str`.

    Raises:
        ValueError: it does not parse; one line that shows the place or the legal names.

    Example:
        >>> str(parse("routing(clusters=8, window=None)"))
        'routing(clusters=8)'
        >>> str(parse("local(128)|global_tokens(4)"))
        'local(128) | global_tokens(4)'
    """
    call = _kind_call(text)
    if call is None:
        return _of_pattern(text)
    name, options = call.func.id, ATTENTION[call.func.id].options
    if call.args or any(each.arg is None for each in call.keywords):
        raise ValueError(f"{text.strip()!r}: {name} takes {_legal(options)}, by name")
    given = {each.arg: _value(each, options, text) for each in call.keywords}
    settings = [(word, given.get(word, each.default)) for word, each in options.items()]
    return Attention(name, None, tuple(settings))


def parse_layers(text: str) -> tuple[Attention, ...]:
    """Return what a text describes that separates layers by `;`, in turn.

    Raises:
        ValueError: a part does not parse.
    """
    return tuple(map(parse, text.split(";")))


def _of_pattern(text: str) -> Attention:
    try:
        pattern = patterns.parse(text)
    except ValueError as error:
        kinds = ", ".join(name for name in ATTENTION if name != SOFTMAX)
        raise ValueError(f"{error}; alone and with options also {kinds}") from None
    return Attention(pattern=None if pattern == patterns.full() else pattern)


def _kind_call(text: str) -> ast.Call | None:
    """The call of a kind that a text is; None where it names none."""
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls = [
        node
        for node in ast.walk(body)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ATTENTION.keys() - {SOFTMAX}
    ]
    if not calls:
        return None
    if calls[0] is not body:
        raise ValueError(
            f"{text.strip()!r}: {calls[0].func.id}(...) stands alone: only patterns "
            "are joined by & | ~"
        )
    return body


def _value(keyword: ast.keyword, options: Mapping[str, Option], text: str) -> Any:
    """The value of an option, checked."""
    name, option = keyword.arg, options.get(keyword.arg)
    if option is None:
        raise ValueError(
            f"{text.strip()!r}: there is no option {name!r}, but {_legal(options)}"
        )
    if option.choices:
        word = getattr(keyword.value, "id", getattr(keyword.value, "value", None))
        if word not in option.choices:
            raise ValueError(
                f"{text.strip()!r}: {name} must be one of {', '.join(option.choices)}"
            )
        return word
    value = getattr(keyword.value, "value", None)
    if value is None and option.default is None:
        return None
    wanted = float if isinstance(option.default, float) else int
    legal = type(value) is int or (wanted is float and type(value) is float)
    if not legal or not option.low <= value < math.inf:
        kind = "a number" if wanted is float else "an integer"
        raise ValueError(
            f"{text.strip()!r}: {name} must be {kind} of at least {option.low}"
        )
    if option.multiple and value % option.multiple:
        raise ValueError(
            f"{text.strip()!r}: {name} must be a multiple of {option.multiple}"
        )
    return wanted(value)


def _legal(options: Mapping[str, Option]) -> str:
    return ", ".join(options) or "nothing"
