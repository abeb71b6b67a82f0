"""Patterns as text: `causal() & (local(128) | global_tokens(4))`."""

import ast
from typing import Any

from transformer_jax.patterns.base import Pattern
from transformer_jax.patterns.constructors import PATTERNS


def parse(text: str) -> Pattern:
    """Return the pattern that a text describes; the inverse of `str`.

    But rule() is in no text.

    The text is an expression of the constructors, `&`, `|`, `~` and parentheses.
    Nothing is evaluated but those.

    Raises:
        ValueError: it does not parse; the message shows the place and the legal names.

    Example:
        >>> str(parse("local(2)|causal()&~strided(4)"))
        'local(2) | causal() & ~strided(4)'
    """
    text = text.strip()
    if not text:
        raise _complaint(text, 1, "a pattern is missing; full() allows every edge")
    try:
        tree = ast.parse(text, mode="eval")
        return _pattern(tree.body, text)
    except SyntaxError as error:
        raise _complaint(text, error.offset or 1, error.msg) from None
    except (RecursionError, MemoryError):
        raise ValueError(
            f"the pattern {text[:40]!r}... is nested too deeply to be read"
        ) from None


def parse_layers(text: str) -> tuple[Pattern, ...]:
    """Return the patterns of a text that separates them by `;`: one a layer, in turn.

    Raises:
        ValueError: one of them does not parse.

    Example:
        >>> [str(pattern) for pattern in parse_layers("local(2); full()")]
        ['local(2)', 'full()']
    """
    return tuple(map(parse, text.split(";")))


def _pattern(node: ast.AST, text: str) -> Pattern:
    """The pattern of one node of the tree."""
    try:
        return _made(node, text)
    except _WrongTextError:
        raise
    except (TypeError, ValueError) as error:
        raise _complaint(text, node.col_offset + 1, str(error)) from None


def _made(node: ast.AST, text: str) -> Pattern:
    """The same, with errors that do not know their place."""
    match node:
        case ast.BinOp(left, ast.BitAnd(), right):
            return _pattern(left, text) & _pattern(right, text)
        case ast.BinOp(left, ast.BitOr(), right):
            return _pattern(left, text) | _pattern(right, text)
        case ast.UnaryOp(ast.Invert(), operand):
            return ~_pattern(operand, text)
        case ast.Call(ast.Name(name), positional, keywords) if name in PATTERNS:
            values = [_argument(each, text) for each in positional]
            named = {each.arg: _argument(each.value, text) for each in keywords}
            return PATTERNS[name](*values, **named)
        case ast.BoolOp() | ast.UnaryOp(ast.Not()):
            message = "patterns are joined by &, | and ~, not by and, or, not"
            raise _complaint(text, node.col_offset + 1, message)
    raise _complaint(text, node.col_offset + 1, "this is no pattern")


def _argument(node: ast.AST, text: str) -> Any:
    """An integer, None, a tuple of arguments, or a pattern."""
    match node:
        case ast.Constant(int() | None as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int(value))):
            return -value
        case ast.Tuple(elements) | ast.List(elements):
            return tuple(_argument(each, text) for each in elements)
        case ast.Constant(value):
            message = f"an argument is an integer, not {value!r}"
            raise _complaint(text, node.col_offset + 1, message)
    return _pattern(node, text)


class _WrongTextError(ValueError):
    """A complaint that names its place."""


def _complaint(text: str, column: int, message: str) -> _WrongTextError:
    """One line that points at a column, counted from 1."""
    at = repr(text[column - 1 :]) if text[column - 1 :] else "its end"
    return _WrongTextError(
        f"pattern {text!r}, column {column}, at {at}: {message}; legal names are "
        f"{', '.join(PATTERNS)}, joined by & | ~"
    )
