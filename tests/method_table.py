"""README's table of the kinds of attention, made from the ATTENTION table.

python tests/method_table.py        writes it into README.md
"""

from pathlib import Path

from transformer_jax.attention import ATTENTION

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- the ATTENTION table -->\n", "<!-- until here -->\n"
WORDS = ("causal", "cross", "padding", "decode", "memory", "exact_mask")


def method_table() -> str:
    """Return the table as Markdown."""
    words = [word.replace("_", " ") for word in WORDS]
    titles = ["kind", "paper", "file", "products a head", *words]
    lines = [titles, ["---"] * len(titles)]
    for name, row in ATTENTION.items():
        marks = ["yes" if word in row.capabilities else "no" for word in WORDS]
        cost = row.cost.replace("**2", "²").replace(" * ", " ")
        lines.append([f"`{name}`", row.paper, f"`{row.file}`", cost, *marks])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def written(text: str) -> str:
    """Return README's text with the table between its marks."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + method_table() + END + rest.split(END)[1]


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
