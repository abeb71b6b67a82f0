"""The commands, one module each: `define_flags(flags)` and `run(flags) -> result`."""

# Command -> its module in this folder, imported when it is called.
COMMANDS = ("train", "evaluate", "decode", "check")
