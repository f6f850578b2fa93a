"""The rows of research in the table of the conformance tests."""

from dynamiq_jax.methods import ErrorFeedback, Exact, resolve_method
from dynamiq_research import EF21M, THC, ARCTopK, GlobalCompensation, Marsit, PowerSGD
from tests.conformance.rows import Row

# What lies beyond the clamp is lost.
_THC = {"error": (8e-3, 1.2e-2), "key": "noise", "bias": 0.02, "gain": (-0.012, -0.005)}
_THC |= {"most_lost": 1024, "draws": True}

RESEARCH = {
    # Half of 1/31 of what lies between spikes.
    "flash_communication": Row(
        method=resolve_method("flash_communication"),
        error=(8e-4, 2.1e-3),
        reach=32,
        recodes=True,
        stays=True,
        mesh=("all_to_all",),
    ),
    # The energy of the smallest of the blocks.
    "omnireduce": Row(
        method=resolve_method("omnireduce"),
        error=(0.06, 0.09),
        reach=1,
        mesh=("ring", "all_to_all"),
    ),
    # The energy of the smallest seven of eight blocks.
    "topk_chunked": Row(method=resolve_method("topk_chunked"), error=(0.17, 0.25), reach=1),
    # Noise has no low rank: most of it is left out.
    "powersgd": Row(method=PowerSGD(), error=(0.7, 0.95), same_bits=False, draws=True, floats=True),
    "powersgd_feedback": Row(
        method=ErrorFeedback(inner=PowerSGD()),
        error=(0.7, 0.95),
        same_bits=False,
        floats=True,
        mesh=("all_to_all",),
    ),
    # 8% of the coordinates of each worker.
    "top_k": Row(method=resolve_method("top_k"), error=(0.28, 0.36), reach=1),
    # First steps have one key. Groups are chosen by a hash, and not by their values.
    "split_sketch": Row(
        method=resolve_method("split_sketch"), error=(0.8, 1.2), draws=True, mesh=("all_to_all",)
    ),
    "ef21m": Row(
        method=EF21M(inner=ARCTopK(inner=Exact())),
        error=(0.25, 0.7),
        reach=1,
        same_bits=False,
        floats=True,
    ),
    # The error of the method inside, in a first step.
    "global_compensation": Row(
        method=GlobalCompensation(inner=Marsit()), error=(0.7, 0.85), reach=256
    ),
    "thc": Row(method=THC(), same_bits=False, **_THC),
    "entropy_coded": Row(
        method=resolve_method("entropy_coded"), same_bits=False, mesh=("all_to_all",), **_THC
    ),
    # As topk_chunked, with estimates of norms.
    "arc_top_k": Row(
        method=resolve_method("arc_top_k"), error=(0.2, 0.6), key="choice", reach=1, draws=True
    ),
    # All but one of eight.
    "rand_k": Row(
        method=resolve_method("rand_k"),
        error=(0.8, 0.95),
        key="choice",
        reach=20_001,
        mesh=("ring", "all_to_all"),
    ),
    # Signs: heavy tails get the scale of most of their row.
    "marsit": Row(
        method=Marsit(), error=(0.7, 0.85), key="choice", reach=256, mesh=("ring", "all_to_all")
    ),
}
