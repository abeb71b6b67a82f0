"""The command line: `transformer-jax COMMAND`, or `python -m transformer_jax`."""

import contextlib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import IO

from transformer_jax import __version__
from transformer_jax.commands import COMMANDS
from transformer_jax.commands.help import help_of, summary_of
from transformer_jax.config import remedy

DONE, FAILED, REFUSED, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code.

    0 done; 1 failed later; 2 wrong flags, config or paths, found before work starts; 75
    told to stop, saved: start it again; 130 interrupted from the keyboard.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    command = arguments[0] if arguments else "--help"
    if command in ("--help", "-h", "help"):
        print(_usage())
        return DONE if arguments else REFUSED
    if command == "--version":
        print(f"transformer-jax {__version__}")
        return DONE
    if command not in COMMANDS:
        return _complain(f"unknown command {command!r}\n{_usage()}", REFUSED)
    if {"--help", "-h", "-help"} & set(arguments):
        print(help_of(command))
        return DONE
    if sys.stdout is None:
        return _complain(f"{command}: standard output is closed", REFUSED)
    with _standard_output() as output:
        return _run(command, arguments[1:], output)


def _run(command: str, arguments: Sequence[str], output: IO[str]) -> int:
    """Run a command and turn what it raises into one line and an exit code."""
    # Late: importing jax takes a second, and a wrong command should not wait for it.
    from jax.errors import JaxRuntimeError

    from transformer_jax.checkpoints import CheckpointError
    from transformer_jax.commands.flags import parse
    from transformer_jax.config import ConfigError
    from transformer_jax.data import InvalidText
    from transformer_jax.reports import NonFiniteLossError
    from transformer_jax.trainer import PreemptedError

    module, code = _module(command), DONE
    try:
        values = parse(command, arguments, module.define_flags)
        if "output" in inspect.signature(module.run).parameters:
            module.run(values, output)
        else:
            result = module.run(values)
            print(json.dumps(result, allow_nan=False), file=output)
            # What `check` says of itself; other commands raise.
            code = DONE if result.get("ok", True) else FAILED
        output.flush()
    except ConfigError as error:
        return _complain(f"{command}: {error}", REFUSED)
    except PreemptedError as error:
        return _complain(f"{command}: {error}", PREEMPTED)
    except (CheckpointError, NonFiniteLossError, InvalidText) as error:
        return _complain(f"{command}: {error}", FAILED)
    except ImportError as error:
        # Of the file system, when a path is opened.
        if "gcsfs" not in str(error):
            raise
        hint = remedy("gcs")
        return _complain(f"{command}: gs:// paths need gcsfs: {hint}", REFUSED)
    except BrokenPipeError:
        text = "nobody reads the standard output any more"
        return _complain(f"{command}: {text}", FAILED)
    except OSError as error:
        return _complain(f"{command}: {error}", FAILED)
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        hint = "use smaller batches (data.tokens_per_batch, decode.rows)"
        return _complain(f"{command}: out of memory, {hint}: {error}", FAILED)
    except KeyboardInterrupt:
        return _complain(f"{command}: interrupted", INTERRUPTED)
    return code


def _module(command: str) -> object:
    return importlib.import_module(f"transformer_jax.commands.{command}")


@contextlib.contextmanager
def _standard_output() -> Iterator[IO[str]]:
    """Give standard output to the command alone: what libraries print goes elsewhere.

    The file descriptor itself is turned to standard error, since C++ code prints too.
    """
    sys.stdout.flush()
    output = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    os.dup2(2, 1)
    try:
        yield output
    finally:
        sys.stdout.flush()
        os.dup2(output.fileno(), 1)
        # The command has flushed; what is left could not be written, and it said so.
        with contextlib.suppress(OSError):
            output.close()


def _usage() -> str:
    lines = [f"  {command:10}{summary_of(command)}" for command in COMMANDS]
    return "\n".join(
        [
            "usage: transformer-jax COMMAND --flags",
            *lines,
            "transformer-jax COMMAND --help explains one",
        ]
    )


def _complain(text: str, code: int) -> int:
    print(f"transformer-jax {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
