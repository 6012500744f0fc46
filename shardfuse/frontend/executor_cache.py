"""FusionExecutorCache: from arguments to a bound program, found by what matters about the arguments."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import zip_longest
from threading import RLock

import torch

from ..allocation.global_sizes import global_sizes
from ..compiler import Plan, compile_fusion
from ..device import device_here
from ..errors import EmptyFusionError, InputError, NoPlanError
from ..executor.agreement import agreed, failures_told
from ..executor.autocast import no_autocast
from ..executor.binding import Argument, bind_arguments, is_out_of, ranges_of
from ..executor.cache import LRUCache
from ..executor.choices import Tuned
from ..executor.comparison import describe
from ..executor.compile_workers import Submit
from ..executor.fitting import begun
from ..executor.host_program import Program, empty_program
from ..executor.options import CompileOptions
from ..executor.plain_arguments import are_taken_as_they_are, outside_transforms, received, without_graph
from ..executor.resharding import sum_over_mesh
from ..executor.symmetric_slots import device_in_reach, hosts_of, taken_back_on_failure, why_no_exchange
from ..executor.timeline import Timeline, record
from ..executor.timing import Timer
from ..executor.tuning import Tuner, check_can_tune, tune_segments
from ..executor.turns import turn_here
from ..executor.uncompiled import uncompiled
from ..executor.written_inputs import are_unwritable, written_places
from ..ir.caller_lines import lines_named
from ..ir.fusion import Fusion
from ..ir.scalar import Number, Scalar
from ..ir.tensor_view import TensorView
from ..mesh import current_rank, world_size
from ..mesh.groups import world_key
from ..mesh.process import check_is_a_rank
from ..passes.settle_inputs import settle_inputs
from .argument_checks import (
    asks_other_ranks,
    check_device,
    check_known,
    check_layouts,
    check_meshes,
    is_all_on_meshes,
    ranks_of,
)
from .bound_call import BoundCall, Made, Sizes
from .building import Kernels, builder_of, built, check_shares
from .counted_calls import RefusalsNoted, agree_on_exchange_of_sizes
from .exchanges import agree_on_memory, plan_on, promises, told_elsewhere, with_exchanges_here
from .forks import forgotten_in_forks
from .profiled import observed
from .promise_arguments import check_promises_kept
from .script import definition_script
from .tuned_plans import Chosen, warn_of_untuned
from .whole_arguments import wholes_named

PROGRAMS = 256
"""Bound programs that one fusion keeps."""
_making = RLock()
"""Held while a program of one rank is made: threads that come to it at once make it once.  Of several ranks' programs
one thread makes all, see ``turns``."""
_ANY_TURN = nullcontext()


class FusionExecutorCache:
    """Runs one fusion at any sizes.  Plans are kept by unsharded sizes, programs by sizes and strides too."""

    def __init__(self, fusion: Fusion, options: CompileOptions) -> None:
        settle_inputs(fusion)
        fusion.close()
        self.fusion = fusion
        self.options = options
        self.last_made: Made | None = None
        """The program of the last run, and what it was made of."""
        self._last_planned: Plan | None = None
        self.plans: LRUCache[Hashable, Plan] = LRUCache(PROGRAMS)
        """By unsharded sizes.  No plan depends on what a caller gives up: executors of one fusion may share them."""
        self.programs: LRUCache[Hashable, Made] = LRUCache(PROGRAMS)
        self._tuned: LRUCache[Hashable, Chosen] = LRUCache(PROGRAMS)
        shapes = fusion.shape_scalars()
        self._ranges = ranges_of(fusion)
        self._shape_scalars = [k for k, i in enumerate(fusion.inputs) if i.val in shapes]
        self._written = written_places(fusion)
        self._asks = asks_other_ranks(fusion)
        self._script: str | None = None
        self._lines_named = lines_named(fusion)
        self._team = ranks_of(fusion)
        self.sends: bool | None = None
        """Do ranks send one another anything in its programs?  None where none was made yet."""
        self._turn: tuple[Hashable, AbstractContextManager[None]] | None = None
        forgotten_in_forks(self)

    def forget(self) -> None:
        """In a forked process: what ranks run together is no longer found, but asked about, and refused."""
        if len(self._team) > 1:
            self.programs, self._turn = LRUCache(PROGRAMS), None

    @property
    def last_program(self) -> Program | None:
        """That of the last run."""
        return None if self.last_made is None else self.last_made.program

    @property
    def last_plan(self) -> Plan | None:
        """That of the last run; before the first one, the last that was made."""
        return self._last_planned if self.last_made is None else self.last_made.plan

    @uncompiled
    def execute(
        self, arguments: Sequence[Argument], *, sizes: Sizes | None = None, device: torch.device | None = None
    ) -> list[torch.Tensor | None]:
        """The local outputs, which carry no graph; ``None`` for an output that is not on this rank's mesh.

        ``sizes``: unsharded shapes of inputs, for uneven shards of symbolic size.
        """
        given, arguments = arguments, self._received(arguments)
        outside = nullcontext() if arguments is given else outside_transforms()
        with self._lines_named, without_graph(self.fusion, arguments), outside, self.turn():
            run = observed(self.program(arguments, sizes, device).run, self.fusion)
            return list(run(*arguments))

    def ready(self, arguments: Sequence[Argument]) -> Made | None:
        """The program for these arguments, where it was bound before and they can be handed over as they are."""
        if self._asks or type(arguments) not in (list, tuple) or not are_taken_as_they_are(arguments):
            return None
        try:
            return self.programs.get(self._key(arguments, None, None))
        except InputError:
            return None  # which is said where arguments are checked

    @property
    def is_found_by_layouts(self) -> bool:
        """Is a program of tensors alone found by their shapes, strides, dtypes and devices?"""
        return not (self._asks or self._written)

    def run(self, made: Made, arguments: Sequence[Argument]) -> list[torch.Tensor | None]:
        """The local outputs of a program that is ``ready``."""
        with without_graph(self.fusion, arguments), self.turn():
            return list(observed(self.called(made).run, self.fusion)(*arguments))

    def timeline(self, arguments: Sequence[Argument], sizes: Sizes | None = None) -> Timeline:
        """What ran when in a run on these arguments."""
        arguments = self._received(arguments)
        device = next((a.device for a in arguments if isinstance(a, torch.Tensor)), torch.device("cpu"))
        with without_graph(self.fusion, arguments), outside_transforms(), self.turn(), no_autocast(device.type):
            return record(self.program(arguments, sizes), arguments, current_rank(), device)

    def turn(self) -> AbstractContextManager[None]:
        """Around a run: that of this rank's thread that runs programs of several ranks, where this is one."""
        if len(self._team) < 2:
            return _ANY_TURN
        key, turn = world_key(), self._turn
        if turn is None or turn[0] != key:
            check_is_a_rank(f"a fusion over ranks {list(self._team)} was called")
            self._turn = turn = key, turn_here().of(self._team) if world_size() > 1 else _ANY_TURN
        return turn[1]

    def program(
        self, arguments: Sequence[Argument], sizes: Sizes | None = None, device: torch.device | None = None
    ) -> Program:
        """The program for these arguments, found or made."""
        with RefusalsNoted(self, self._team):
            key = self._key(arguments, sizes, device)
            # what was bound by asking other ranks has another key, and is asked about again
            made = self.programs.get(key) if sizes or not self._asks else None
            if made is None:
                with _making if len(self._team) < 2 else nullcontext():
                    made = self._bind(self._prepare(key, arguments, dict(sizes or {}), device))
        return self.called(made)

    def called(self, made: Made) -> Program:
        """Its program, noted as this rank's next call."""
        self.last_made, program = made, made.program
        if program.note is not None:
            program.note(program.call)
        return program

    def tune(
        self, arguments: Sequence[Argument], sizes: Sizes | None, device: torch.device | None, tuner: Tuner
    ) -> list[Tuned]:
        """Tune the kernels of the plan for these arguments; all later programs of the plan have what was chosen.

        All ranks of the meshes call it.  What was chosen for each segment that has kernels, in order.
        """
        arguments = self._received(arguments)
        with without_graph(self.fusion, arguments), outside_transforms(), self.turn():
            call = self._prepare(self._key(arguments, sizes, device), arguments, dict(sizes or {}), device)
            check_can_tune(self.options, call.bound.device, tuner.timer)
            self._bind(call)
            if not call.has_part:
                return []
            found = self._tune(call, tuner)
            warn_of_untuned(self._plan_of(call))
            return [tuned for tuned in found if tuned is not None]

    def tuner(self, timer: Timer | None = None, seconds: float | None = None) -> Tuner:
        return Tuner(self.options, timer, sys.stderr, seconds)

    def begin_compiling(self, arguments: Sequence[Argument], submit: Submit) -> None:
        """Plan for arguments like these, and have other processes compile the kernels.  Of one rank's tensors."""
        call = self._prepare(self._key(arguments, None, None), arguments, {}, None)
        builder_of(self.fusion, call, self._plan_of(call), self.options, {}, fit=partial(begun, submit=submit))

    def is_compiled(self, arguments: Sequence[Argument]) -> bool:
        return self.programs.get(self._key(arguments, None, None)) is not None

    def plan(
        self, sizes: Sizes, numbers: Mapping[Scalar, Number] | None = None, device: torch.device | None = None
    ) -> Plan:
        """The plan for these unsharded sizes, made or found.

        ``numbers``: the scalar inputs that shapes depend on.  ``device``: where it runs, else the current GPU.
        """
        if not self.fusion.outputs:
            raise EmptyFusionError
        key = self._plan_key(sizes, numbers or {}, device)
        plan = self.plans.get(key)
        if plan is None:
            make = partial(
                compile_fusion, self.fusion, sizes, numbers, self.options.ranks_per_node, device=device_here(device)
            )
            plan = with_exchanges_here(make(), self._team, self.options, make)
            tuned = self._tuned.get(key)
            if tuned is not None:
                plan = tuned.within(plan)
            self.plans.put(key, plan)
        self._last_planned = plan
        return plan

    def plan_for(self, arguments: Sequence[Argument] | None, sizes: Sizes | None) -> Plan:
        """For local arguments, for unsharded sizes, or the last one.  Raises ``NoPlanError``."""
        if arguments is not None:
            check_layouts(self.fusion, arguments, ())  # of no other rank: each may ask for a plan alone
            bound = bind_arguments(self.fusion, arguments, current_rank(), None)
            found, unknown = global_sizes(self.fusion, bound.local_shapes, sizes or {})
            check_known(self.fusion, unknown)
            numbers = self._numbers(arguments)
            plan, text = self.plan(found, numbers, bound.device), self._description(found, bound.device, numbers)
            plan = plan_on(plan, text, bound.device, self.options)
            check_shares(self.fusion, plan, bound, found, current_rank())
            return plan
        numbers = [self.fusion.inputs[k].val.name for k in self._shape_scalars]
        if numbers and sizes is not None:
            raise NoPlanError(numbers=numbers)
        if sizes is None and not numbers and all(n >= 0 for tv in self.tensors() for n in tv.shape):
            sizes = {tv: tv.shape for tv in self.tensors()}
        if sizes is None and self.last_plan is not None:
            return self.last_plan
        shapes = {tv: (sizes or {}).get(tv, tv.shape) for tv in self.tensors()}
        if sizes is None or any(n < 0 for shape in shapes.values() for n in shape):
            raise NoPlanError(rank=self._untold(), numbers=numbers)
        if (device := device_in_reach()) is None:
            return self.plan(shapes)
        return plan_on(self.plan(shapes, device=device), self._description(shapes, device), device, self.options)

    def _untold(self) -> int | None:
        return None if self.last_made is None or current_rank() in self._team else current_rank()

    def last_trace(self) -> str:
        """Every stage's text.  Raises ``NoPlanError`` where nothing was planned."""
        if self.last_plan is None:
            raise NoPlanError("last_trace", "", self._untold())
        stages = [*self.last_plan.trace]
        if self.last_program is not None:
            stages += [("kernel", source) for source in self.last_program.kernels]
            stages.append(("host program", self.last_program.text))
        return "\n\n".join(f"# {name}\n{text}" for name, text in stages)

    def tensors(self) -> list[TensorView]:
        return [i.val for i in self.fusion.inputs if isinstance(i.val, TensorView)]

    def _key(self, arguments: Sequence[Argument], said: Sizes | None, device: torch.device | None) -> Hashable:
        described: list[object] = [world_key(), device]
        try:
            for a, taken in zip_longest(arguments, self._ranges):
                described += (
                    (a.shape, a.stride(), a.dtype, a.device)
                    if isinstance(a, torch.Tensor)
                    else (type(a), is_out_of(a, taken))
                )
        except RuntimeError:  # sparse, nested and other tensors that have no strides, or no one shape
            check_layouts(self.fusion, arguments, self._team)
            raise
        described += [arguments[k] for k in self._shape_scalars if k < len(arguments)]
        described += are_unwritable(arguments, self._written) if self._written else ()
        if said:
            described += [(tv, tuple(shape)) for tv, shape in said.items()]
        return tuple(described)

    def _received(self, arguments: Sequence[Argument]) -> Sequence[Argument]:
        """Raises ``InputError``, which is reported to the other ranks."""
        if are_taken_as_they_are(arguments):
            return arguments
        with RefusalsNoted(self, self._team), failures_told(self._team):
            return received(self.fusion, arguments)

    def _plan_key(self, sizes: Sizes, numbers: Mapping[Scalar, Number], device: torch.device | None) -> Hashable:
        where = device_here(device), why_no_exchange(self._team, self.options), hosts_of(self._team)
        return (*(tuple(sizes[tv]) for tv in self.tensors()), *numbers.values(), *where)

    def _prepare(
        self, key: Hashable, arguments: Sequence[Argument], said: dict[TensorView, Sequence[int]],
        device: torch.device | None,
    ) -> BoundCall:  # fmt: skip
        """Check the arguments, and find the unsharded sizes, with the other ranks where it takes them."""
        if not self.fusion.outputs:
            raise EmptyFusionError
        check_meshes(self.fusion)
        ranks, rank = self._team, current_rank()
        check_layouts(self.fusion, arguments, self._team)
        with failures_told(ranks), self._lines_named:
            bound = bind_arguments(self.fusion, arguments, rank, device)
            check_device(self.fusion, arguments, bound.device)
            check_promises_kept(self.fusion.promises, self.options, bound.device)
            sizes, unknown = global_sizes(self.fusion, bound.local_shapes, said)
        if unknown and rank not in ranks and is_all_on_meshes(self.fusion):
            return BoundCall(key, bound, {}, {}, rank, ranks, "", has_part=False)
        if unknown:  # the exchange is a collective: all have to come to the same one
            agree_on_exchange_of_sizes(self.fusion, ranks, self._description({}, bound.device))
        for u in unknown:
            mesh = u.tv.domain.mesh
            assert mesh is not None, "only a sharded axis is asked about"
            sizes[u.tv][u.axis] = sum_over_mesh(u.local, mesh, u.mesh_dims, self._team, bound.device)
        key = (key, tuple(map(tuple, sizes.values()))) if unknown else key
        numbers = self._numbers(arguments)
        text = self._description(sizes, bound.device, numbers)
        call = BoundCall(key, bound, sizes, numbers, rank, ranks, text, sized=said)
        return told_elsewhere(call, self.options, partial(self.plan, sizes, numbers, bound.device))

    def _bind(self, call: BoundCall) -> Made:
        if not call.has_part:
            return Made(empty_program(len(self.fusion.outputs)), None)
        made = self.programs.get(call.key)
        if made is None:
            kernels: Kernels = {}
            compiled = partial(builder_of, self.fusion, call, options=self.options, kernels=kernels)
            plan = partial(self.plan, call.sizes, call.numbers, call.bound.device)
            with wholes_named(self.fusion, call):
                agree_on_memory(call, self.options, plan, compiled, self._lines_named)
                made = self._made(call, call.text, kernels)
            is_tuned = self._tuned.get(self._plan_key(call.sizes, call.numbers, call.bound.device)) is not None
            if self.options.autotunes(call.bound.device) and not is_tuned:
                self._tune(call, self.tuner())
                made = self.programs.get(call.key)
                assert made is not None, "it was bound once more with what was chosen"
        self.last_made = made  # of ranks that are threads, the one that comes last
        return made

    def _made(self, call: BoundCall, text: str, kernels: Kernels) -> Made:
        """The program of ``call``, of which all ranks have to have ``text`` alike.  kernels: as of ``_build``."""
        with taken_back_on_failure(), agreed(call.ranks, text, call.text) as promised, self._lines_named:
            made = self._build(call, kernels)
            assert made.plan is not None, "this rank has a part of it"
            promised += promises(made.plan, call)
        self.programs.put(call.key, made)
        self.sends = bool(self.sends) or made.program.note is not None
        self.last_made = made
        return made

    def _tune(self, call: BoundCall, tuner: Tuner) -> list[Tuned | None]:
        """All ranks come here, or each one alone to an answer that was given: none waits for one that does not."""
        whole, plan = self.plan(call.sizes, call.numbers, call.bound.device), self._plan_of(call)
        builder = builder_of(self.fusion, call, plan, self.options, {})
        segments = [None if s.like is not None else (s.segment, s.scheduler) for s in plan.segments]
        tuned = tune_segments(builder, segments, call.ranks, call.text, tuner)
        chosen = Chosen.of(tuned, is_apart=plan is not whole)
        key = self._plan_key(call.sizes, call.numbers, call.bound.device)
        self._tuned.put(key, chosen)
        self.plans.put(key, chosen.within(whole))
        self.programs = LRUCache(PROGRAMS)
        self._made(call, f"{call.text}\ntuned: {chosen.schedules}", {})
        return tuned

    def _numbers(self, arguments: Sequence[Argument]) -> dict[Scalar, Number]:
        """The values of the scalar inputs that shapes depend on."""
        found = {self.fusion.inputs[k].val: arguments[k] for k in self._shape_scalars}
        return {s: v for s, v in found.items() if isinstance(s, Scalar) and not isinstance(v, torch.Tensor)}

    def _description(self, sizes: Sizes, device: torch.device, numbers: Mapping[Scalar, Number] | None = None) -> str:
        if self._script is None:
            self._script = definition_script(self.fusion)
        values = {scalar.name: value for scalar, value in (numbers or {}).items()}
        return describe(self._script, {tv.name: shape for tv, shape in sizes.items()}, values, self.options, device)

    def _plan_of(self, call: BoundCall) -> Plan:
        plan = self.plan(call.sizes, call.numbers, call.bound.device)
        return plan_on(plan, call.text, call.bound.device, self.options)

    def _build(self, call: BoundCall, kernels: Kernels) -> Made:
        """kernels: those of the plan whose kernels exchange; where ranks have agreed on collectives, others run."""
        kernels = {} if (plan := self._plan_of(call)).apart is None else kernels
        return built(self.fusion, call, plan, self.options, kernels)
