"""What a program is made of, loops included."""

import math

import jax


def largest_value(function, shapes):
    """Elements of the largest array that a program makes, loops included."""
    largest = 0

    def walk(jaxpr):
        nonlocal largest
        for equation in jaxpr.eqns:
            sizes = [math.prod(out.aval.shape) for out in equation.outvars]
            largest = max(largest, *sizes)
            for value in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(function)(*shapes).jaxpr)
    return largest
