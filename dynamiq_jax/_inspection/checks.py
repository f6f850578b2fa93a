"""Checks of the text of a program that comes from a file: it is whole, and its parts fit."""

import graphlib

from dynamiq_jax._inspection.hlo import HloComputation, HloProgram, ProgramError, heads_and_ends


def check_program(text: str) -> None:
    """Raise ProgramError for a text that is not all of a program.

    A part of a program would show a part of its collectives, and none of its mistakes.

    Args:
      text: text of an optimized HLO program.

    Raises:
      ProgramError: the text is cut off, instructions or computations are missing, or a computation
        calls itself.
    """
    _check_ends(text)
    try:
        program = HloProgram(text)
    except (ValueError, IndexError) as error:
        raise ProgramError(f"an instruction is damaged: {error}.") from None
    if not program.entry:
        raise ProgramError("the text is cut off: it has no ENTRY computation.")
    for name, computation in program.computations.items():
        _check_instructions(name, computation)
        for line in computation.values():
            for callee in line.callees:
                if callee not in program.computations:
                    raise ProgramError(
                        f"the computation {callee!r} is missing, which {line.name!r} of {name!r} "
                        "calls."
                    )
    _check_calls(program)


def _check_ends(text: str) -> None:
    """Raise ProgramError for a computation without its closing brace."""
    current = ""
    for head in heads_and_ends(text):
        if head and current:
            break
        current = head
    if current:
        raise ProgramError(
            f"the text is cut off: the computation {current!r} has no closing brace."
        )


def _check_instructions(name: str, computation: HloComputation) -> None:
    """Raise ProgramError for a computation without a root, or an operand without its line."""
    if not any(line.is_root for line in computation.values()):
        raise ProgramError(f"lines are missing: the computation {name!r} has no ROOT.")
    for line in computation.values():
        missing = [operand for operand in line.operands if operand not in computation]
        if missing:
            raise ProgramError(
                f"lines are missing: {line.name!r} of {name!r} takes {missing[0]!r}, which is not "
                "there."
            )


def _check_calls(program: HloProgram) -> None:
    """Raise ProgramError for a computation that calls itself, directly or by others."""
    graph = {
        name: {callee for line in computation.values() for callee in line.callees}
        for name, computation in program.computations.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        raise ProgramError(f"the computation {error.args[1][0]!r} calls itself.") from None
