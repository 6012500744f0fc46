"""What regions of compiled models take on an H200, of kernels of shardfuse's and of Inductor's (``compile/cost.py``).

Torch 2.11; ``docs/measured.md`` has the tables.  What counts is the ratio of the two sides, which other GPUs have much
the same.  Where the two models are unsure, Inductor's is the cheaper and shardfuse's the dearer one.
"""

from __future__ import annotations

from .record import H200

BYTES_PER_US = 4.3e6
"""Of a large copy, read and written: 4250 GB/s at 1 GB."""
KERNEL_US = 3.0
"""A kernel's start and end, beside what its bytes take: copies of 32 to 512 MB lose 5 us, of which a stream of kernels
hides some."""
HOST_US = 5.0
"""Of the host for a call of the op beyond its launches, and for each launch, of Inductor's too; 0 in CUDA graphs, and
where the GPU is behind the host."""
LEAST_US = 4.0
"""What a region has to gain: times of a few microseconds are launches, which may or may not be waited for."""
POOL_GAIN_US, POOL_GRADIENT_GAIN_US = 0.65, 6.0
"""For a million pixels of an image in channels-last, of a max pool and of its gradient: 185 and 119 us, 727 and 105
were measured for 103 millions, 3 x 3 with a stride of 2; 37 and 17, 428 and 14 for 13 millions, 2 x 2."""
FLOPS_PER_US = 9.9e8
"""Of matrix products of 16-bit numbers, at most."""
PRODUCTS_US = 12.0
"""Of products at that rate for each kernel that is not pointwise, from which on the GPU is behind the host.  Graphs of
BERT-large and ViT-L have 13 to 18, those of ResNet-50 less than 7: where a step takes 39 and 25 ms of the GPU, it takes
29 and 27 of the host."""
SHARE_OF_COPY = {
    "persistent": 0.88,
    "mix_order": 0.80,
    "reduction": 0.85,
    "pointwise": 0.85,
    "transpose": 0.25,
    "looped": 0.80,
    "torch_call": 0.3,
}
"""The least shares of a copy that each scheduler's kernels reach in ``docs/measured.md``, misaligned rows apart; of
transposes, what those between a group norm's gradients reach."""
GROUP_SHARE, GROUP_BESIDE_SHARE = 0.55, 0.25
"""Of rows of several axes, as a group's channels and pixels are; with values for each channel and sample beside."""
GROUP_ACCESSES_PER_US = 7e5
"""Elements that are read and written in a microsecond by programs which share rows of several axes and wait for two
sums: gradients of batch norms of contiguous images, 16 x 256 x 4096 and 2 x 32 x 64 x 64 x 64, of 16 bits 6.7e5 to
8.3e5, of 32 bits 5.9e5 to 6.4e5."""
GROUP_TENSORS = 6
"""Tensors of which registers hold enough elements for that rate: of thirteen, ten of them added up first, it was
3.3e5."""
SCATTERED_SHARES = {"persistent": 0.2, "looped": 0.5}
"""Of such rows in channels-last."""
COLUMN_GROUP_SHARE = 0.88
"""Of loops over columns that a group of programs shares, as of a batch norm and its gradients in channels-last: 0.86 to
0.93 in a ResNet's step, of 90 to 2500 MB."""
COLUMN_GROUP_PROGRAMS = 1 << (H200.multiprocessors.bit_length() - 1)
"""Programs with which such a loop has the whole machine: a power of two, as a group's members are.  With half as many,
40 channels of 96 x 28 x 28, it reached 0.49 of a copy, and 0.66 where the last tile was half empty, of 96 and 144."""
STATISTICS_SHARE = 0.6
"""Of a kernel that takes the statistics of channels alone: 42 MB took 19 us."""
TURNED_SHARE = 0.25
"""Of kernels whose tensors have elements side by side along different axes, as a dropout's mask that is contiguous has
beside a convolution's gradients in channels-last: 0.15 to 0.27, where Inductor's took as long or half of that."""
TURNING_SUM_SHARE = 0.6
"""Of plain reductions whose tensors have elements side by side along different axes (``Reductions.turned_tile``):
gradients of a layer scale and of a bias, 154, 77 and 39 MB, took 45, 30 and 19 us, where Inductor's took 97, 54 and 48;
of heads that become rows, 50 and 77 MB, 25 and 43, where the first took Inductor 28."""
INDUCTOR_TURNED_SHARE = 0.14
"""Of Inductor's kernels that sum rows and columns of tensors of two orders: gradients of LayerNorms of images,
64 x 96 x 56 x 56 and 64 x 192 x 28 x 28, of which an operand has pixels innermost, took 507 and 227 us, and 206 and 101
in shardfuse's kernels."""
TURNING_COPIES = 2
"""How many times as long as cuDNN's copies those in a graph take, which the kernels that compute the images store.  Of
a U-Net of volumes whose instance norms are contiguous, forward, 422 MB in place of cuDNN's 491 took 950 us more in
those kernels, and cuDNN 455 less.  Of norms in channels-last only the first image and the weights are copied."""
OPS_PER_US = 2.4e7
"""Of shardfuse's kernels: gradients of GELU and a bias, 34 million elements, took 56 us, where bytes would take 55."""
PERSISTENT_ROW = 1024
"""Elements of a row that a kernel of Inductor's holds (``persistent_reduction`` of an inner reduction)."""
INDUCTOR_ROW_SHARE, INDUCTOR_LOOP_SHARE, INDUCTOR_COLUMN_SHARE = 0.92, 0.85, 0.85
"""Shares of a copy: rows held, rows looped over, and columns, in kernels of Inductor's that read once."""
INDUCTOR_MASKED_SHARE, MASKED_ROW = 0.66, 512
"""Of rows of a softmax that asks of each whether anything of it is left, from so many elements on: 411 and 822 MB of
rows of 512 took 150 and 285 us; rows of 128 reach 0.84."""
INDUCTOR_CONVOLUTION_SHARE = 0.4
"""Of norms of rows of what a convolution gives: of the channels of 64 x 96 x 56 x 56, 16 bits, with the bias that is
added and stored, 116 MB, took 96 us in loops, of 58 and 29 MB 33 and 17; with a wide result too, 154 MB, 137."""
INDUCTOR_IMAGE_SHARE = 0.6
"""Of such norms of images in channels-last that Inductor's own kernels compute, where it lays out what it stores by
itself: three in a ConvNeXt-T's step, of 232, 116 and 58 MB, took 237, 26 and 14 us, the first in loops."""
INDUCTOR_SHORT_SHARE, SHORT_COLUMN = 0.25, 64
"""Of sums over a middle axis of at most ``SHORT_COLUMN`` elements, of what costly functions give: over 7 x 7 pixels of
images in channels-last, with a SiLU, 15 to 30 MB took 0.13 to 0.25 of a copy, 31 us where shardfuse's took 19."""
INDUCTOR_SCATTERED_SHARE = 0.30
"""Of rows whose elements lie apart in memory by a few bytes each, as a group's channels do in channels-last: group
norms reach 0.15 to 0.35."""
INDUCTOR_GROUPED = 1.3
"""Times as long as the estimate where rows have several axes: group norms, 16 to 250 MB, took 1.25 to 1.8 times, as
indices are divided for each element."""
INDUCTOR_OPS_PER_US = 1.9e7
"""Of a kernel that sums columns, what it computes besides: erf and exp of bias gradients took 411 us for 134 million
elements, where their bytes would have taken 125."""
INDUCTOR_POINTWISE_OPS_PER_US = 3e7
"""Of one that only makes elements: gradients of GELU, 34 million elements, took 54 to 68 us, their bytes 47."""
INDUCTOR_COLUMN_VARIANCE_SHARE = 0.45
"""Of columns whose variance is taken: 0.33 to 0.8 in the batch norms of a ResNet, half of them below 0.45."""
UNCONFIRMED_SHARE, CONFIRMED_USE = 0.1, 0.9
"""Of a loop over columns beside another kernel, unless it uses so much of the machine.  Batch norms with SiLU and the
mean over their pixels, of ten sizes from 128 x 32 x 112 x 112 to 128 x 1152 x 7 x 7, took 0.6 to 1.06 of Inductor's
time, 16 bits, with ReLU three others 0.7 to 0.96; of float32, 64 x 512 x 7 x 7, whose loop has half of the machine, 53
us where Inductor took 21."""
INDUCTOR_COLUMNS_SHARE = 0.65
"""Of columns with more than two sums: of the gradients of two batch norms at once 0.55, 0.63, 0.64 and 0.83."""
COLUMNS_UNSPLIT, COLUMN_ROWS = 64 * H200.multiprocessors, 1024
"""Columns from which on Inductor sums each in one go.  Of fewer, of so many rows, it sums parts, which another kernel
adds up, one for each result: 1.3 to 2.8 us in a ResNet's step, and the time between launches."""
INDUCTOR_FINISH_US = 7.0
"""Of what adds up columns behind rows and columns at once, for each result: 6 to 10 for 768 to 1024 columns."""
RANDOM = 40
"""Instructions of a random number: ten rounds of Philox."""
BY_PLACE = 80
"""Of one that has ten rounds to itself, as Inductor's have: a dropout, a sum and a LayerNorm of rows of 768 to 4096
elements of bfloat16, 6 to 17 million, took 3.7 us for a million lanes, of which 0.5 are those of the other ops."""
DRAWN_POWER = 3
"""Of kernels that draw numbers: bytes at the speed of a copy and instructions take the third root of the sum of their
cubes.  Dropouts with a sum and a LayerNorm that move 38 to 157 MB, of either side, are 6 % off at most by it, and 20 by
the larger of the two."""
HEAVY = {
    **dict.fromkeys(("philox_uniform", "inductor_random"), BY_PLACE),
    **dict.fromkeys(("exp", "log"), 8),
    **dict.fromkeys(("sigmoid", "pow"), 12),
    **dict.fromkeys(("div", "reciprocal", "sqrt"), 4),
    "erf": 15,
    "tanh": 35,
}
"""Instructions of an element in shardfuse's kernels; of other ops 1."""
INDUCTOR_HEAVY = {**HEAVY, "erf": 40, "inductor_random": 118}
"""In Inductor's, whose ``erf`` is libdevice's: GELU with a bias and a scale took 214 us for 134 million elements, 140
for 84 million, GELU alone 53 for 34 million, all 6.3e5 in a microsecond; its gradient, 34 million, 54 to 68.  The
dropout, sum and norm took 4.2 us for a million lanes in rows of 768 and 1024, 4.8 to 6.7 in longer ones."""
INDUCTOR_STORED_MASK = 10
"""Of a random number more where the mask is stored too, and goes through shared memory for each of its two readers:
regions of BERT-large, 8 million elements, took 44.3, 45.4 and 48.3 us, 2.5 more than without."""
INDUCTOR_BLOCK = 2048
"""Lanes of a row at a time at most, a power of two: RMSNorm with a dropout took as long for each of those of 1280 and
1600 elements."""
INDUCTOR_MIXED_SHARE = 0.72
"""Of a kernel of Inductor's that reduces rows and columns at once: 0.55 to 0.72 was measured."""
SPLIT_ROWS, SPLIT_ELEMENTS = H200.filling, 8192
"""Fewer rows, of more elements than that, are reduced in parts (``inner_reduction_splits``)."""
MIXED_ROWS, MIXED_COLUMNS = 4096, 16384
"""Rows at least, and columns at most, of such a kernel."""
JOINED = 8
"""Parts at most that Inductor joins in a kernel that computes them (``max_pointwise_cat_inputs``)."""
REALIZED_READS = 4
"""Loads, of more than which Inductor stores what several read (``realize_reads_threshold``)."""
REREAD = 0.35
"""What a further pass over a row costs, of the first, where the rows of all programs stay in L2."""
L2_BYTES = 30e6
"""Of 50 MB: what rows that are read again may take."""
RESIDENT_ROWS = 4 * H200.multiprocessors
"""Rows that are read at a time: of four programs of each multiprocessor."""
