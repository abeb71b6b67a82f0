"""The commands, one module each, with two functions.

`define_flags(values, argv)` defines the command's flags. `run(values)` returns what is
printed as one JSON line; `"ok": False` in it makes the exit code 1. A `run` that takes
`output` as well writes to standard output itself and returns nothing.
"""

# Command -> its module in this folder, imported when it is called.
COMMANDS = (
    "train",
    "evaluate",
    "decode",
    "average",
    "distill",
    "check",
    "draw",
    "bench",
)
