"""PTX in kernels: the text of a function's statement of assembly, and lines that several of them have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .statements import Statement, function_text

AT_ONCE, REST = 32, 40
"""Polls that follow one another; and nanoseconds between later ones.  Where all 16 warps of 64 programs polled, without
a rest, a launch took 610 us on 2 x H200: until they looked at the clock.  One warp of each takes 3 to 4."""
POLLS = 1024
"""Between two looks at the clock and at the report: a fraction of a millisecond."""
FIRST_THREAD = ["mov.u32 thread, %tid.x;", "setp.eq.u32 first, thread, 0;"]
"""``first``: is it the thread that acts for its program?"""
DONE = "mov.u32 $0, 0;"
"""The result of what has none: Triton's statements of assembly all give something."""


def assembled(
    lines: Sequence[str], arguments: Mapping[str, str], *, results: int = 1, pack: int = 1, is_returned: bool = False
) -> str:
    """The statement of ``lines`` for each element of its arguments, none of which the compiler may leave out or repeat.

    arguments: their texts, each with the kind of register that it comes in, "l" of 64 bits or "r" of 32.  results:
    how many, of 32 bits.  pack: elements of each that a thread has at once; operands are ``$0`` and so on, results
    first, the elements of one side by side.
    """
    kinds = ["=r"] * results * pack + [kind for kind in arguments.values() for _ in range(pack)]
    types = ", ".join(["tl.int32"] * results)
    return "\n".join(
        [
            f"{'return ' if is_returned else ''}tl.inline_asm_elementwise(",
            '    """{',
            *(" " * (4 if line.endswith(":") else 8) + line for line in lines),
            '    }""",',
            f'    "{",".join(kinds)}",',
            f"    [{', '.join(arguments)}],",
            f"    dtype={f'({types})' if results > 1 else types},",
            "    is_pure=False,",
            f"    pack={pack},",
            ")",
        ]
    )


def documented(name: str, parameters: Sequence[str], says: str, body: Sequence[Statement]) -> str:
    """A function of Triton's with a docstring."""
    return function_text(name, parameters, [f'"""{says}"""', *body])


def pointers(count: int) -> dict[str, str]:
    """Arguments that are so many addresses, ``ptr0`` and so on."""
    return {f"ptr{k}": "l" for k in range(count)}


def declared(words: int) -> str:
    """Registers of so many words: each as it is loaded, its bits, and the number of the launch or turn it is of."""
    return f".reg .b64 word<{words}>; .reg .u32 bits<{words}>, found<{words}>;"


def loading(words: int, first: int) -> list[str]:
    """The words at the operands from number ``first`` on: all are under way at once."""
    loads = [f"ld.relaxed.sys.global.b64 word{k}, [${first + k}];" for k in range(words)]
    return [*loads, *(f"mov.b64 {{bits{k}, found{k}}}, word{k};" for k in range(words))]


def given(words: int) -> list[str]:
    """The bits of the words as results."""
    return [f"mov.u32 ${k}, bits{k};" for k in range(words)]


def polling(flags: int, expected: str, report: str, leave: str) -> list[str]:
    """Goes back to ``again`` until all flags are as expected; now and then goes on, to ``leave`` after a report."""
    return [
        *(f"setp.{'eq.and' if k else 'eq'}.u32 go, found{k}, {expected}{', go' if k else ''};" for k in range(flags)),
        "@go bra done;",
        f"add.u32 turns, turns, 1; setp.lt.u32 go, turns, {AT_ONCE};",
        "@go bra again;",
        f"nanosleep.u32 {REST};",
        f"and.b32 late, turns, {POLLS - 1}; setp.ne.u32 go, late, 0;",
        "@go bra again;",
        f"ld.relaxed.sys.global.b64 told, [{report}];",
        "setp.ne.u64 go, told, 0;",
        f"@go bra {leave};",
    ]


def until(limit: str) -> list[str]:
    """Goes back to ``again`` within the limit, by the GPU's clock."""
    return [
        "mov.u64 now, %globaltimer;",
        "setp.eq.u64 go, since, 0;",
        "@go mov.u64 since, now;",
        "sub.u64 now, now, since;",
        f"setp.lt.u64 go, now, {limit};",
        "@go bra again;",
    ]


def reporting(words: int, pack: int, epoch: str, report: str, place: str, names: str) -> list[str]:
    """The first rank whose word is missing goes into the report."""
    each = reversed(range(words))
    return [
        *(f"setp.ne.u32 go, found{k}, {epoch}; @go mov.u32 late, {8 * (k // pack)};" for k in each),
        f"cvt.u64.u32 now, late; add.u64 now, {names}, now; ld.global.b64 name, [now];",
        f"or.b64 told, {place}, name; st.relaxed.sys.global.b64 [{report}], told;",
    ]
