"""Models of images: ResNet, ConvNeXt and ViT as in timm, residual blocks of a diffusion UNet, and a DiT block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(channels, width, 1, bias=False),
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.Conv2d(width, out, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (width, width, out))
        self.short = None
        if stride != 1 or channels != out:
            self.short = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norms[0](self.convolutions[0](x)))
        y = functional.relu(self.norms[1](self.convolutions[1](y)))
        y = self.norms[2](self.convolutions[2](y))
        return functional.relu(y + (x if self.short is None else self.short(x)))


class ResNet(nn.Module):
    def __init__(self, depths: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            for k in range(depth):
                blocks.append(Bottleneck(channels, width << stage, 2 if stage and not k else 1))
                channels = 4 * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.blocks(self.stem(images)).mean((2, 3))
        return functional.cross_entropy(self.head(x), targets)


class ChannelNorm(nn.LayerNorm):
    """Over the channels of an image [n, c, h, w]."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.scale = nn.Parameter(torch.full((dim,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.down(functional.gelu(self.up(y))).permute(0, 3, 1, 2)
        return x + y * self.scale.reshape(1, -1, 1, 1)


class ConvNext(nn.Module):
    def __init__(self, depths: Sequence[int], dim: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, dim, 4, 4), ChannelNorm(dim, eps=1e-6)]
        for stage, depth in enumerate(depths):
            width = dim << stage
            if stage:
                layers += [ChannelNorm(width // 2, eps=1e-6), nn.Conv2d(width // 2, width, 2, 2)]
            layers += [ConvNextBlock(width) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(self.layers(images).mean((2, 3)))
        return functional.cross_entropy(self.head(x), targets)


class VitBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(attended(self.qkv(self.norm_1(x)), self.heads))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


def attended(qkv: Tensor, heads: int) -> Tensor:
    """[batch, tokens, 3 x dim] -> [batch, tokens, dim]."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Vit(nn.Module):
    def __init__(self, dim: int, layers: int, heads: int, patch: int, side: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.first = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, dim) * 0.02)
        self.blocks = nn.Sequential(*(VitBlock(dim, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), 1) + self.positions
        x = self.norm(self.blocks(x))
        return functional.cross_entropy(self.head(x[:, 0]), targets)


class UnetBlock(nn.Module):
    """Group norm, SiLU and convolution twice, with the embedded time between and dropout before the second."""

    def __init__(self, channels: int, out: int, time: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(32, channels), nn.GroupNorm(32, out)
        self.conv_1, self.conv_2 = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.time, self.dropout = nn.Linear(time, out), nn.Dropout(dropout)
        self.short = nn.Conv2d(channels, out, 1) if channels != out else None

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv_1(functional.silu(self.norm_1(x)))
        y = y + self.time(functional.silu(time))[:, :, None, None]
        y = self.conv_2(self.dropout(functional.silu(self.norm_2(y))))
        return y + (x if self.short is None else self.short(x))


class Unet(nn.Module):
    """The residual blocks of a diffusion UNet's way down, each level of half the side."""

    def __init__(self, widths: Sequence[int], blocks: int, time: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, widths[0], 3, padding=1)
        self.levels = nn.ModuleList()
        for k, width in enumerate(widths):
            before = widths[max(k - 1, 0)]
            inner = [UnetBlock(before if not n else width, width, time, dropout) for n in range(blocks)]
            self.levels.append(nn.ModuleList(inner))
        self.halvings = nn.ModuleList(nn.Conv2d(w, w, 3, 2, 1) for w in widths[:-1])
        self.norm = nn.GroupNorm(32, widths[-1])
        self.last = nn.Conv2d(widths[-1], 4, 3, padding=1)

    def forward(self, images: Tensor, time: Tensor, targets: Tensor) -> Tensor:
        x = self.first(images)
        for k, level in enumerate(self.levels):
            for block in level:
                x = block(x, time)
            if k < len(self.halvings):
                x = self.halvings[k](x)
        return functional.mse_loss(self.last(functional.silu(self.norm(x))).float(), targets)


class DitBlock(nn.Module):
    """Shift, scale and gate of both halves come from the condition."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.modulation = nn.Linear(dim, 6 * dim)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift_2, scale_2, gate_2 = self.modulation(functional.silu(condition)).chunk(6, 1)
        mixed = self.out(attended(self.qkv(_modulated(self.norm_1(x), shift, scale)), self.heads))
        x = x + gate[:, None] * mixed
        hidden = functional.gelu(self.up(_modulated(self.norm_2(x), shift_2, scale_2)), approximate="tanh")
        return x + gate_2[:, None] * self.down(hidden)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class Dit(nn.Module):
    """Blocks alone, on tokens."""

    def __init__(self, dim: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DitBlock(dim, heads) for _ in range(blocks))

    def forward(self, x: Tensor, condition: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, condition)
        return functional.mse_loss(x.float(), targets)
