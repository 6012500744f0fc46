"""A residual block of a diffusion UNet, its image sharded by rows over all ranks, forward and backward.

    scripts/launch.sh examples/unet_block.py

Group norm and SiLU are one fusion, which exchanges each group's statistics between the ranks: a few numbers an image.
A convolution of 3 x 3 needs one row of each neighbour, which `EdgeRows` exchanges by plain torch.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn.functional import silu

from shardfuse import DeviceMesh, initialize
from shardfuse.nn import GroupNorm

GROUPS, TIME = 32, 64


class Block(nn.Module):
    """Plain torch: group norm, SiLU and a convolution, twice; the embedded time is added in between."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = (nn.GroupNorm(GROUPS, channels) for _ in range(2))
        self.conv_1, self.conv_2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(TIME, channels)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """x: [images, channels, rows, columns], embedded: [images, TIME] -> as x."""
        y = self.conv_1(silu(self.norm_1(x))) + self.time(embedded)[:, :, None, None]
        return x + self.conv_2(silu(self.norm_2(y)))


class ShardedBlock(nn.Module):
    """The same for this rank's rows of the images, with the weights of ``whole``."""

    def __init__(self, whole: Block, channels: int, mesh: DeviceMesh) -> None:
        super().__init__()
        options = {"activation": "silu", "mesh": mesh, "input": Shard(2), "parameters": "local"}
        self.norm_1, self.norm_2 = (GroupNorm(GROUPS, channels, **options) for _ in range(2))
        self.conv_1, self.conv_2 = (nn.Conv2d(channels, channels, 3, padding=(0, 1)) for _ in range(2))
        self.time = nn.Linear(TIME, channels)
        self.load_state_dict(whole.state_dict())

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        y = self.conv_1(EdgeRows.apply(self.norm_1(x))) + self.time(embedded)[:, :, None, None]
        return x + self.conv_2(EdgeRows.apply(self.norm_2(y)))


class EdgeRows(torch.autograd.Function):
    """[n, c, rows, w] -> [n, c, rows + 2, w]: the neighbours' nearest rows around; zeros at the image's own edges."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        above, below = swap_with_neighbours(x[:, :, :1], x[:, :, -1:])
        return torch.cat((above, x, below), 2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        """Gradients of borrowed rows go back to their owners, which add them to those of their own."""
        for_first, for_last = swap_with_neighbours(grad[:, :, :1], grad[:, :, -1:])
        own = grad[:, :, 1:-1].clone()
        own[:, :, :1] += for_first
        own[:, :, -1:] += for_last
        return own


def swap_with_neighbours(to_above: Tensor, to_below: Tensor) -> tuple[Tensor, Tensor]:
    """What the rank above sends down, and what the rank below sends up; zeros where there is none."""
    sent = to_above.contiguous(), to_below.contiguous()
    received = torch.zeros_like(sent[0]), torch.zeros_like(sent[1])
    transfers = []
    for k, peer in enumerate((dist.get_rank() - 1, dist.get_rank() + 1)):
        if 0 <= peer < dist.get_world_size():
            transfers += [dist.P2POp(dist.isend, sent[k], peer), dist.P2POp(dist.irecv, received[k], peer)]
    for request in dist.batch_isend_irecv(transfers) if transfers else ():
        request.wait()
    return received


def results(block: nn.Module, x: Tensor, embedded: Tensor, seed: Tensor) -> list[Tensor]:
    """The block's output, and the gradients of x and of all weights where that of the output is ``seed``."""
    block.zero_grad()
    x = x.detach().requires_grad_()
    y = block(x, embedded)
    y.backward(seed)
    if isinstance(block, ShardedBlock):  # ranks have summands of these gradients; those of the norms are summed already
        for weight in (*block.conv_1.parameters(), *block.conv_2.parameters(), *block.time.parameters()):
            dist.all_reduce(weight.grad)
    return [y.detach(), x.grad, *(weight.grad for weight in block.parameters())]


def distance(found: list[Tensor], right: list[Tensor]) -> float:
    """The largest difference, each as a share of its tensor's largest element."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, right, strict=True))


def main() -> None:
    world = initialize()
    torch.backends.cudnn.allow_tf32 = False  # convolutions in float32 are to be that exact
    mesh = DeviceMesh(range(world.world_size))
    images, channels, side = (2, 320, 128) if world.device.type == "cuda" else (2, 64, 32)
    torch.manual_seed(0)  # the same weights and images on every rank
    whole = Block(channels)
    sharded = ShardedBlock(whole, channels, mesh).to(world.device)
    sizes = [(images, channels, side, side), (images, TIME), (images, channels, side, side)]
    x, embedded, seed = (torch.randn(size).to(world.device) for size in sizes)
    own = mesh.shard_tensor(x, 2), embedded, mesh.shard_tensor(seed, 2)  # this rank's rows

    found, eager = results(sharded, *own), results(whole.to(world.device), x, embedded, seed)
    wide = results(whole.double(), x.double(), embedded.double(), seed.double())
    of_rank = [mesh.shard_tensor(t, 2) for t in wide[:2]] + wide[2:]
    error, rounding = distance(found, of_rank), distance(eager, wide)
    assert error <= 2 * rounding + torch.finfo(torch.float32).eps, f"off by {error:.1e}, eager torch by {rounding:.1e}"

    began = time.perf_counter()
    for _ in range(10):
        last = results(sharded, *own)
    last[1].sum().item()  # waits until all have run
    if world.rank == 0:
        ms = (time.perf_counter() - began) / 10 * 1e3
        on = f"{mesh.size} x {world.device.type}"
        print(f"UNet block, forward and backward, {list(x.shape)}, {side // mesh.size} rows a rank, on {on}")
        print(f"all results differ from unsharded float64 torch by {error:.1e} (eager float32: {rounding:.1e})")
        print(f"{ms:.1f} ms")


if __name__ == "__main__":
    main()
