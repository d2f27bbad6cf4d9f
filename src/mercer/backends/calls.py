"""Functions for Numba that are compiled once and called, where Numba and LLVM would put them in place at each call."""

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def by_call(function: Callable[..., None]) -> Any:
    """What Numba makes of a function of integers, floats and booleans without a result, called and never put in place:
    code for every dtype and tail at each of its calls would take a compiler minutes.
    """
    kinds = {float: types.float64, bool: types.boolean}
    given = [kinds.get(p.annotation, types.int64) for p in inspect.signature(function).parameters.values()]

    def typed(_context: Any, *_given: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            compiled = context.compile_subroutine(builder, function, signature)
            context.call_internal(builder, compiled.fndesc, signature, values)
            name = compiled.fndesc.llvm_func_name
            for block in builder.function.blocks:
                for line in block.instructions:
                    if isinstance(line, ir.CallInstr) and line.callee.name == name:
                        line.attributes.add("noinline")
            return context.get_dummy_value()

        return types.none(*given), generate

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = ["context", *inspect.signature(function).parameters]
    typed.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
    typed.__name__, typed.__doc__ = function.__name__, function.__doc__
    return intrinsic(typed)
