"""Whether a training step is right: at its first weights, at trained ones, and along the way.

Roundings may grow from step to step, so that two right steps end at other losses.  A step is therefore judged where
both it and the reference have the same weights: the first, and those that the reference has after ``STEPS`` steps of
gradient descent.  How far apart the losses are on the way is told, and from which step on, but judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

STEPS, RATE = 50, 0.005
"""Steps over which losses are compared, and their rate."""
ROUNDING = 2.0**-8
"""Of bfloat16, relatively."""
FARTHER = 2.0
"""Times as far from the reference as eager torch: each rounds activations at other places."""


@dataclass(frozen=True)
class Step:
    """forward and backward, as a step has them; update: by plain gradient descent."""

    model: torch.nn.Module
    run: Callable[[], torch.Tensor]

    def update(self, rate: float) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p.sub_(p.grad, alpha=rate)

    def weights(self) -> dict[str, torch.Tensor]:
        """By the plain peer's names."""
        named = self.model.named_parameters()
        return {name.replace(".", "_").removeprefix("blocks_"): parameter for name, parameter in named}

    def take(self, weights: dict[str, torch.Tensor]) -> None:
        """Into the parameters' own memory, which a CUDA graph reads."""
        with torch.no_grad():
            for name, parameter in self.weights().items():
                getattr(parameter, "to_local", lambda p=parameter: p)().copy_(weights[name])


@dataclass(frozen=True)
class Evaluated:
    """A step's loss, and this rank's gradients, at some weights."""

    loss: float
    gradients: dict[str, torch.Tensor]

    @staticmethod
    def of(step: Step) -> Evaluated:
        loss = step.run().item()
        gradients = {
            name: getattr(p.grad, "to_local", lambda p=p: p.grad)()
            .detach()
            .float()
            .clone()  # a graph's replays write over the gradients
            for name, p in step.weights().items()
        }
        return Evaluated(loss, gradients)

    def distance(self, other: Evaluated) -> float:
        """Of the gradients, relatively, by the norm of all ranks' together; every rank asks."""
        assert self.gradients.keys() == other.gradients.keys(), "the models have the same parameters"
        squares = [(self.gradients[n] - g).double().square().sum() for n, g in other.gradients.items()]
        whole = [g.double().square().sum() for g in other.gradients.values()]
        sums = torch.stack([torch.stack(squares).sum(), torch.stack(whole).sum()])
        dist.all_reduce(sums)
        return float((sums[0] / sums[1]).sqrt())

    def is_right(self, reference: Evaluated, eager: Evaluated) -> bool:
        """A loss near zero is as far off as the logits' roundings, so eager torch's distance is allowed as well."""
        allowed = max(ROUNDING * abs(reference.loss), FARTHER * abs(eager.loss - reference.loss))
        distance, eagers = self.distance(reference), eager.distance(reference)
        return abs(self.loss - reference.loss) <= allowed and distance <= FARTHER * eagers

    def told(self, reference: Evaluated, eager: Evaluated) -> str:
        allowed = FARTHER * eager.distance(reference)
        return (
            f"loss {abs(self.loss - reference.loss):.4f}, "
            f"gradients {self.distance(reference):.2e} apart ({allowed:.2e} allowed)"
        )


@dataclass(frozen=True)
class Trained:
    """losses: of ``STEPS`` steps from the first weights; weights: after them.

    first, late: at the first weights, and at the reference's after its steps.
    """

    losses: tuple[float, ...]
    first: Evaluated
    late: Evaluated
    weights: dict[str, torch.Tensor]

    @staticmethod
    def of(step: Step, late: dict[str, torch.Tensor] | None = None) -> Trained:
        """late: the reference's trained weights; None for the reference itself, which is evaluated at its own."""
        first = Evaluated.of(step)
        losses = [first.loss]
        for _ in range(STEPS - 1):
            step.update(RATE)
            losses.append(step.run().item())
        weights = {name: p.detach() for name, p in step.weights().items()}
        if late is not None:
            step.take(late)
        return Trained(tuple(losses), first, Evaluated.of(step), weights)

    def is_right(self, reference: Trained, eager: Trained) -> bool:
        """Every rank asks, for all of it."""
        first = self.first.is_right(reference.first, eager.first)
        return self.late.is_right(reference.late, eager.late) and first

    def told(self, reference: Trained, eager: Trained) -> str:
        return (
            f"at first {self.first.told(reference.first, eager.first)}, "
            f"at trained weights {self.late.told(reference.late, eager.late)}, "
            f"losses on the way {self.apart(reference)}, eager torch {eager.apart(reference)}"
        )

    def apart(self, other: Trained) -> str:
        """The largest difference, and the first step at which the losses are more than a rounding apart."""
        pairs = list(zip(self.losses, other.losses, strict=True))
        largest = max(abs(a - b) for a, b in pairs)
        far = (k for k, (a, b) in enumerate(pairs) if abs(a - b) > ROUNDING * abs(b))
        first = next(far, None)
        return f"within {largest:.4f}" + ("" if first is None else f" (a rounding apart from step {first} on)")
