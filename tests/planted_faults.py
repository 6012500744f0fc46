"""Faults that `scripts/mutate.py` plants, each with the tests that have to find it, and what it changes at random."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """``before``, which stands once in ``file``, becomes ``after``.

    kind: single (pytest), interpreter (under TRITON_INTERPRET=1), ranks (two, by mpirun) or gpu.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    kind: str = "single"


FAULTS = (
    Fault(
        "a share that is no multiple of its block has the weights of another channel",
        "shardfuse/codegen/indexing.py",
        "    aligned = size > 0 and start % size == 0 and step % size == 0\n",
        "    aligned = size > 0\n",
        ("tests/interpreter/test_codegen_team.py", "-k", "within_a_channel"),
        "interpreter",
    ),
    Fault(
        "a chunk of two channels has the weight of the first",
        "shardfuse/codegen/indexing.py",
        "        if start // g.below == stop // g.below:\n",
        "        if True:\n",
        ("tests/interpreter/test_codegen.py", "-k", "group_norm"),
        "interpreter",
    ),
    Fault(
        "an exchange is not waited for",
        "shardfuse/executor/collective_calls.py",
        "_bytes(rows.to(out.device)), taken, given, group)\n",
        "_bytes(rows.to(out.device)), taken, given, group, async_op=True)\n",
        ("tests/multirank/test_communication.py", "-k", "is_there_when"),
        "ranks",
    ),
    Fault(
        "a broadcast is not waited for",
        "shardfuse/executor/collective_calls.py",
        "    _c10d.broadcast(_bytes(staged), root, group)\n",
        "    _c10d.broadcast(_bytes(staged), root, group, async_op=True)\n",
        ("tests/multirank/test_communication.py", "-k", "is_there_when"),
        "ranks",
    ),
    Fault(
        "a cat repeats an element of a part that is shorter",
        "shardfuse/ops/shape_calls.py",
        ', {"c*": total}, alike=names)\n',
        ', {"c*": total})\n',
        ("tests/test_binding_errors.py", "-k", "cat_repeats"),
    ),
    Fault(
        "binding does not look at devices",
        "shardfuse/executor/binding.py",
        "    if home is not None and not val.is_cpu and tensor.device != home:\n",
        "    if False:\n",
        ("tests/test_binding_errors.py",),
    ),
    Fault(
        "a kernel writes over what a later one reads",
        "shardfuse/schedulers/overwritten_inputs.py",
        "        if at is None or any(target in s.inputs for s, _, _ in segments[at + 1 :]):\n",
        "        if at is None:\n",
        ("tests/interpreter/test_given_up.py", "-k", "second_kernel"),
        "interpreter",
    ),
    Fault(
        "pieces of an inner dim arrive one behind the other",
        "shardfuse/executor/bound_collectives.py",
        "Pieces(piece, before, piece, piece * members)",
        "Pieces(piece, before, piece, piece)",
        ("tests/test_nccl_calls.py", "-k", "as_they_are_bound"),
    ),
    Fault(
        "what hooks give back for saved tensors is taken as it comes",
        "shardfuse/nn/bound_op.py",
        "is_known=fd is op.forward,",
        "is_known=True,",
        ("tests/test_repeats.py", "-k", "hooks"),
    ),
    Fault(
        "a program that tuning has let go of runs on",
        "shardfuse/frontend/repeat.py",
        "fec.programs is not self._programs or ",
        "",
        ("tests/test_repeats.py", "-k", "let_go"),
    ),
    Fault(
        "a collective does not wait for the kernels before it",
        "shardfuse/executor/streams.py",
        "        stream.wait_stream(current)\n",
        "",
        ("tests/gpu/test_streams.py", "-k", "waits_for"),
        "gpu",
    ),
    Fault(
        "what reads a collective's result does not wait for it",
        "shardfuse/executor/streams.py",
        "        current.wait_event(done)\n",
        "",
        ("tests/gpu/test_streams.py", "-k", "waits_for"),
        "gpu",
    ),
    Fault(
        "an exchange buffer that is kept is in a pool of CUDA graphs",
        "shardfuse/executor/kept_tensors.py",
        "    thread.start()\n    thread.join()\n",
        "    run()\n",
        ("tests/gpu/test_ops_of_modules.py", "-k", "reduce-overhead"),
        "gpu",
    ),
    Fault(
        "fmod takes a denormal for 0",
        "shardfuse/executor/kernel.py",
        '            self._options["enable_reflect_ftz"] = False\n',
        "            pass\n",
        ("tests/gpu/test_special_values_gpu.py", "-k", "literals and fmod"),
        "gpu",
    ),
    Fault(
        "SwiGLU is computed in 16 bits",
        "shardfuse/nn/placed_spec.py",
        "(self.dtype, *self.other_dtypes) else DataType.Float\n",
        "(self.dtype, *self.other_dtypes) else self.dtype\n",
        ("tests/test_nn.py", "-k", "sixteen_bits"),
    ),
    Fault(
        "a call that is refused is not noted",
        "shardfuse/frontend/counted_calls.py",
        "if isinstance(error, Exception) and (self._of is None or self._of.sends is not False):",
        "if False:",
        ("tests/test_calls.py", "-k", "refused_is_noted_once"),
    ),
    Fault(
        "a refused call of a program that sends nothing is noted",
        "shardfuse/frontend/counted_calls.py",
        "if isinstance(error, Exception) and (self._of is None or self._of.sends is not False):",
        "if isinstance(error, Exception):",
        ("tests/test_calls.py", "-k", "sends_nothing"),
    ),
    Fault(
        "numbers that shapes are made of are not compared",
        "shardfuse/executor/comparison.py",
        '        *(f"{name} = {value!r}" for name, value in numbers.items()),\n',
        "",
        ("tests/test_agreement.py", "-k", "numbers_that or chooses"),
    ),
    Fault(
        "ranks per node are not compared",
        "shardfuse/executor/comparison.py",
        'f"autotune={options.autotune}, ranks_per_node={options.ranks_per_node}, "\n',
        'f"autotune={options.autotune}, "\n',
        ("tests/test_agreement.py", "-k", "chooses"),
    ),
    Fault(
        "unsharded sizes are not compared",
        "shardfuse/executor/comparison.py",
        '        *(f"{name}: unsharded {list(shape)}" for name, shape in sizes.items()),\n',
        "",
        ("tests/test_agreement.py",),
    ),
    Fault(
        "an average over ranks is a sum",
        "shardfuse/frontend/inputs.py",
        'Record(Pointwise("div"), (total, count), (mean,))',
        "Record(Cast(), (total,), (mean,))",
        ("tests/test_dtensor.py", "-k", "partial_values"),
    ),
    Fault(
        "averages divide by every rank, of sums too",
        "shardfuse/frontend/inputs.py",
        'for ranks, op in zip(extents, each, strict=True) if op == "avg"]',
        "for ranks, op in zip(extents, each, strict=True)]",
        ("tests/test_dtensor.py",),
    ),
    Fault(
        "a sum divided by something else is a mean",
        "shardfuse/analysis/paired_reductions.py",
        "            if count is None or not isinstance(by, Scalar) or by.value != count:\n",
        "            if count is None or not isinstance(by, Scalar):\n",
        ("tests/test_statistics.py",),
    ),
    Fault(
        "16-bit sums over ranks are added up in 16 bits",
        "shardfuse/executor/rank_reduction.py",
        "            return stacked.sum(0, dtype=_SUM_DTYPE.get(dtype, dtype)).to(dtype)\n",
        "            total = stacked[0]\n            for x in stacked[1:]:\n                total = total + x\n"
        "            return total\n",
        ("tests/test_communication_threads.py",),
    ),
    Fault(
        "a largest of ranks drops NaN",
        "shardfuse/executor/rank_reduction.py",
        "        return extreme(op, stacked, (0,))\n",
        "        return extreme(op, stacked.nan_to_num(), (0,))\n",
        ("tests/test_communication_threads.py",),
    ),
    Fault(
        "pieces are cut evenly where torch.chunk does not",
        "shardfuse/executor/collective_calls.py",
        "    chunk = -(-extent // parts)\n",
        "    chunk = extent // parts + 1\n",
        ("tests/test_communication_threads.py",),
    ),
)

GROUPS: dict[str, tuple[str, ...]] = {
    "ir": ("shardfuse/ir",),
    "analysis": ("shardfuse/analysis",),
    "allocation": ("shardfuse/allocation",),
    "passes": ("shardfuse/passes",),
    "binding": ("shardfuse/executor/binding.py",),
    "agreement": ("shardfuse/executor/agreement.py",),
    "exchange": ("shardfuse/executor/all_to_all.py",),
    "dtensor": ("shardfuse/frontend/dtensor.py",),
    "nn": ("shardfuse/nn",),
}
"""The code of which `--groups` takes a sample each: files, or folders of files."""

COVERING = (
    "tests/test_agreement.py",
    "tests/test_allocation.py",
    "tests/test_arguments.py",
    "tests/test_bad_calls.py",
    "tests/test_batches.py",
    "tests/test_bind.py",
    "tests/test_binding_errors.py",
    "tests/test_communication_threads.py",
    "tests/test_compat.py",
    "tests/test_definition.py",
    "tests/test_definition_errors.py",
    "tests/test_digits.py",
    "tests/test_dtensor.py",
    "tests/test_empty_shards.py",
    "tests/test_explain.py",
    "tests/test_index_ops.py",
    "tests/test_mesh.py",
    "tests/test_misuse.py",
    "tests/test_narrow_modules.py",
    "tests/test_nn.py",
    "tests/test_nn_uneven.py",
    "tests/test_ops_shapes.py",
    "tests/test_partial_averages.py",
    "tests/test_partial_sums.py",
    "tests/test_passes.py",
    "tests/test_promotion.py",
    "tests/test_recompute.py",
    "tests/test_replicas.py",
    "tests/test_resharding_matrix.py",
    "tests/test_segmenter.py",
    "tests/test_sharding.py",
    "tests/test_sharding_dtypes.py",
    "tests/test_sharding_meshes.py",
    "tests/test_special_values.py",
    "tests/test_statistics.py",
    "tests/test_stream.py",
)
"""Tests among which those of a changed line are looked for: quick ones, in one process, without a GPU."""
