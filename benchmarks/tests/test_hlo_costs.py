"""Costs that `benchmarks.speed.hlo_costs` reads from a program."""

import pytest

from benchmarks.speed import hlo_costs

PROGRAM = """
HloModule example

%step (in: (s32[], f32[8,128], f32[64,128])) -> (s32[], f32[8,128], f32[64,128]) {
  %in = (s32[], f32[8,128], f32[64,128]) parameter(0)
  %turn = s32[] get-tuple-element(%in), index=0
  %small = f32[8,128]{1,0:T(8,128)} get-tuple-element(%in), index=1
  %large = f32[64,128]{1,0:T(8,128)S(1)} get-tuple-element(%in), index=2
  %next = s32[] fusion(%turn), kind=kLoop, calls=%add_one
  %turned = f32[8,128]{0,1:T(8,128)} copy(%small), metadata={op_name="turned"}
  %updated = f32[64,128]{1,0:T(8,128)S(1)} fusion(%large, %turned, %turn), kind=kLoop, calls=%update
  ROOT %out = (s32[], f32[8,128], f32[64,128]) tuple(%next, %turned, %updated)
}

%update (p0: f32[64,128], p1: f32[8,128], p2: s32[]) -> f32[64,128] {
  %p0 = f32[64,128]{1,0} parameter(0)
  %p1 = f32[8,128]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %set = f32[64,128]{1,0} dynamic-update-slice(%p0, %p1, %p2, %p2)
}

%add_one (p3: s32[]) -> s32[] {
  %p3 = s32[] parameter(0)
  %one = s32[] constant(1)
  ROOT %sum = s32[] add(%p3, %one)
}

%more (in2: (s32[], f32[8,128], f32[64,128])) -> pred[] {
  %in2 = (s32[], f32[8,128], f32[64,128]) parameter(0)
  %limit = s32[] constant(7)
  %turn2 = s32[] get-tuple-element(%in2), index=0
  ROOT %less = pred[] compare(%turn2, %limit), direction=LT
}

ENTRY %main (a: f32[8,128], b: f32[64,128]) -> f32[64,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %b = f32[64,128]{1,0:T(8,128)} parameter(1)
  %zero = s32[] constant(2)
  %start = (s32[], f32[8,128], f32[64,128]) tuple(%zero, %a, %b)
  %loop = (s32[], f32[8,128], f32[64,128]) while(%start), condition=%more, body=%step
  %result = f32[64,128]{1,0:T(8,128)} get-tuple-element(%loop), index=2
  ROOT %all = f32[64,128]{1,0:T(8,128)} all-reduce(%result), to_apply=%add_one
}
"""
SMALL, LARGE = 4 * 8 * 128, 4 * 64 * 128


@pytest.fixture(scope="module")
def runs():
    return {run.instruction.name: run for run in hlo_costs.CostProgram(PROGRAM).runs()}


def test_bodies_of_loops_count_as_often_as_they_run(runs):
    times = {name: run.times for name, run in runs.items()}
    assert times == {"next": 5, "turned": 5, "updated": 5, "all": 1}


@pytest.mark.parametrize("limit", (2, 1))
def test_bodies_of_loops_that_end_at_once_do_not_run(limit):
    """The loop begins at 2."""
    program = hlo_costs.CostProgram(PROGRAM.replace("constant(7)", f"constant({limit})"))
    assert {run.instruction.name: run.times for run in program.runs()}["next"] == 0


def test_update_in_place_costs_the_update_alone(runs):
    assert runs["updated"].bytes == 2 * SMALL + 4
    assert runs["updated"].far_bytes == SMALL + 4  # the large array is in vector memory


def test_copy_of_a_layout_is_a_relayout(runs):
    assert [name for name, run in runs.items() if run.moves] == ["turned"]
    assert runs["turned"].total == 5 * 2 * SMALL
    assert runs["turned"].instruction.source == "turned"


def test_bytes_of_collectives_are_those_of_their_operands(runs):
    found = hlo_costs.collectives(list(runs.values()))
    assert found == {"all-reduce": {"times": 1, "bytes": LARGE}}


def test_loop_without_a_constant_trip_count_is_an_error():
    program = PROGRAM.replace("%limit = s32[] constant(7)", "%limit = s32[] copy(%turn2)")
    program = program.replace("index=0\n  ROOT %less", "index=1\n  ROOT %less")
    with pytest.raises(ValueError, match="trip count"):
        hlo_costs.CostProgram(program).runs()
