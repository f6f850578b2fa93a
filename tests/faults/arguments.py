"""Faults of the arguments of a loss: specs, static values, keys, and what is given back."""

from tests.faults import Fault

_TESTS = "tests/test_in_specs.py::"
_LAW = _TESTS + "test_an_array_that_is_no_batch_is_refused_until_it_has_a_spec"
_TYPED = _TESTS + "test_static_values_that_compare_equal_have_programs_of_their_own"
_NOISE = _TESTS + "test_noise_follows_the_keys_and_the_order_of_a_batch"
_HASH = _TESTS + "test_a_hash_reads_all_bits_and_all_places"

FAULTS = (
    Fault(
        "arrays of several leading sizes are split",
        "dynamiq_jax/_api/batch.py",
        "if len(set(assumed)) > 1 or (known and set(assumed) - set(known)):",
        "if known and set(assumed) - set(known):",
        (_LAW,),
    ),
    Fault(
        "an array without a spec may have another size than those with one",
        "dynamiq_jax/_api/batch.py",
        "if len(set(assumed)) > 1 or (known and set(assumed) - set(known)):",
        "if len(set(assumed)) > 1:",
        (_TESTS + "test_arrays_without_a_spec_are_as_long_as_those_with_one",),
    ),
    Fault(
        "every spec splits the leading axis",
        "dynamiq_jax/_api/batch.py",
        "specs = [spec or default for spec in given]",
        "specs = [default for spec in given]",
        (_TESTS + "test_another_axis_than_the_leading_one",),
    ),
    Fault(
        "the largest array is the batch",
        "dynamiq_jax/_api/batch.py",
        "key=lambda size: (assumed.count(size), size)",
        "key=lambda size: -assumed.count(size)",
        (_LAW,),
    ),
    Fault(
        "specs in an error drop those that are given",
        "dynamiq_jax/_api/batch.py",
        "next(left) if role == SPLIT else spec\n",
        "next(left) if role == SPLIT else None\n",
        (_TESTS + "test_specs_in_an_error_keep_those_that_are_given",),
    ),
    Fault(
        "only leading axes are checked to divide",
        "dynamiq_jax/_api/batch.py",
        "if size % workers:",
        "if size % workers and not number:",
        (_TESTS + "test_specs_that_do_not_fit",),
    ),
    Fault(
        "specs of keyword arguments are ignored",
        "dynamiq_jax/_api/arguments.py",
        "for key in self._known_as(where) & set(self.in_specs):",
        "for key in {where} & set(range(9)) & set(self.in_specs):",
        (_TESTS + "test_forms_of_specs",),
    ),
    Fault(
        "an argument has one spec by position and one by name",
        "dynamiq_jax/_api/arguments.py",
        "for other in known[:number] + others",
        "for other in others",
        (_TESTS + "test_specs_that_do_not_fit",),
    ),
    Fault(
        "parameters may have a spec of the batch",
        "dynamiq_jax/_api/arguments.py",
        "(is_module or roles.of(where) != SPLIT)",
        "is_module",
        (_TESTS + "test_specs_that_do_not_fit",),
    ),
    Fault(
        "specs of other axes of the mesh pass",
        "dynamiq_jax/_api/worker_loss.py",
        "        check_axes(self.roles.in_specs, self.names)\n",
        "",
        (_TESTS + "test_specs_that_do_not_fit",),
    ),
    Fault(
        "specs of several arguments are in the order of the positions",
        "dynamiq_jax/_api/arguments.py",
        "by_position = dict(zip(self.given, values, strict=True))",
        "by_position = dict(zip(self.argnums, values, strict=True))",
        (_TESTS + "test_specs_of_several_arguments_are_in_the_order_of_argnums",),
    ),
    Fault(
        "placements on any mesh are specs",
        "dynamiq_jax/_api/worker_loss.py",
        " and sharding.mesh.shape == mesh.shape:",
        ":",
        (_TESTS + "test_parameters_on_another_mesh_are_whole",),
    ),
    Fault(
        "counts are weighted in float16",
        "dynamiq_jax/_api/worker_loss.py",
        "value = value.astype(jnp.float32)",
        "value = value.astype(jnp.float16)",
        (_TESTS + "test_counts_in_aux_are_averaged_in_float32",),
    ),
    Fault(
        "static values of other types share a program",
        "dynamiq_jax/_api/static.py",
        "return Static(value, _typed(value))",
        "return Static(value, value)",
        (_TYPED,),
    ),
    Fault(
        "types inside of tuples are ignored",
        "dynamiq_jax/_api/static.py",
        "parts = tuple(map(_typed, value))",
        "pass",
        (_TYPED,),
    ),
    Fault(
        "types inside of dataclasses are ignored",
        "dynamiq_jax/_api/static.py",
        "parts = tuple(_typed(getattr(value, name)) for name in compared)",
        "pass",
        (_TYPED,),
    ),
    Fault(
        "zeros of both signs share a program",
        "dynamiq_jax/_api/static.py",
        "return type(value), repr(value)",
        "return type(value), value",
        (_TYPED,),
    ),
    Fault(
        "the equality of a static value is ignored",
        "dynamiq_jax/_api/static.py",
        "return type(value), value, parts",
        "return type(value), id(value), parts",
        (_TESTS + "test_values_with_an_equality_of_their_own_share_a_program",),
    ),
    Fault(
        "a hash reads a part of each key",
        "dynamiq_jax/_buckets/fingerprint.py",
        "return jax.random.key_data(leaf).astype(jnp.uint32)",
        "return jax.random.key_data(leaf)[..., 0].astype(jnp.uint32)",
        (_TESTS + "test_a_hash_reads_all_bits_of_keys",),
    ),
    Fault(
        "a hash does not depend on the place in an array",
        "dynamiq_jax/_buckets/fingerprint.py",
        "mix(bits ^ mix(places + mix(salt)))",
        "mix(bits ^ mix(mix(salt)))",
        (_NOISE,),
    ),
    Fault(
        "a hash does not depend on the worker",
        "dynamiq_jax/_buckets/fingerprint.py",
        "mix(word ^ place)",
        "mix(word)",
        (_NOISE,),
    ),
    Fault(
        "a hash reads half of each wide number",
        "dynamiq_jax/_buckets/fingerprint.py",
        "return lax.bitcast_convert_type(leaf, jnp.uint32)\n",
        "return lax.bitcast_convert_type(leaf, jnp.uint32)[..., 0]\n",
        (_HASH,),
    ),
    Fault(
        "a hash drops imaginary parts",
        "dynamiq_jax/_buckets/fingerprint.py",
        "jnp.stack([_bits(leaf.real), _bits(leaf.imag)])",
        "jnp.stack([_bits(leaf.real), _bits(leaf.real)])",
        (_HASH,),
    ),
)
