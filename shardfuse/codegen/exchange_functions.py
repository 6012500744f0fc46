"""The functions by which kernels exchange words with other programs and other ranks, of so many words at a time.

On a GPU each is a statement of assembly, in which the compiler sees no loop; under Triton's interpreter, which runs no
assembly and one program after the other, it waits by Python (``interpreted_waits.py``), or not at all.
"""

from __future__ import annotations

from .assembly import (
    DONE,
    FIRST_THREAD,
    assembled,
    declared,
    documented,
    given,
    loading,
    pointers,
    polling,
    reporting,
    until,
)
from .interpreted_waits import (
    LATER,
    NAME_BITS,
    NAN,
    ROW_BITS,
    interpreted_await,
    interpreted_await_rows,
    interpreted_post,
    interpreted_push,
)

GONE = "-1"
"""What a program that has given up stores in place of a turn."""
_WAITED = ("row", "limit", "report", "names_ptr")
"""Parameters of a wait behind the number that is waited for."""
_OF_WAIT = {"limit": "l", "report": "l", "place": "l", "names_ptr": "l"}
_ALL_HAVE = "The values that all ranks have for ``row``, once every word carries ``epoch``; NaN for what does not come."
_ONE_WARP = "One warp waits for all: so many loads of one line at a time hold up the stores that they wait for."
_PUSHED = "Store the 32 bits of ``value`` below ``epoch``, for another GPU to see at once."
_POSTED = "Store 32 bits of ``value`` below ``epoch``: one word, so that neither is seen without the other."
_COLLECTED = (
    "The bits of every member's words, once all carry ``epoch``: one statement, in which the compiler sees no loop."
)
_AS_THEY_ARE = "The bits of every member's words as they are: programs that run one after the other do not wait."


def _place(number: str) -> str:
    """What is reported where the wait for ``number`` is in vain, but for the rank."""
    return f"place = ({number}.to(tl.int64) << 32) | ((row & 0x{(1 << ROW_BITS) - 1:X}) << {NAME_BITS})"


# words that ranks exchange


def push_text(name: str, *, is_one_row: bool, interpret: bool) -> str:
    """``is_one_row``: a program has one number, which its first thread stores; else threads store those they have."""
    if interpret:
        return interpreted_push(name)
    registers, test = ".reg .b64 word;", ""
    if is_one_row:
        registers += " .reg .pred first; .reg .u32 thread;"
        test = f"{' '.join(FIRST_THREAD)} @first "
    lines = [registers, "mov.b64 word, {$2, $3};", f"{test}st.relaxed.sys.global.b64 [$1], word;", DONE]
    arguments = {"ptr": "l", "value.to(tl.int32, bitcast=True)": "r", "epoch": "r"}
    return documented(name, ["ptr", "epoch", "value"], _PUSHED, [assembled(lines, arguments)])


def await_text(
    name: str, count: int, *, is_one_row: bool, warps: int, interpret: bool, pack: int = 1, of_each: int = 1
) -> str:
    """The function that waits for words at so many addresses.  ``is_one_row``: as of ``push_text``.

    ``pack``: words from each address on that a thread asks for at once.  ``of_each``: addresses of each rank.
    """
    if interpret:
        return interpreted_await(name, count, of_each)
    is_alone = is_one_row and warps > 1
    words, parameters = count * pack, [*pointers(count), "epoch", *_WAITED]
    each = range(words)
    epoch, limit, report, place, names = (f"${2 * words + k * pack}" for k in range(5))
    not_first_warp = ["mov.u32 late, %tid.x; setp.gt.u32 go, late, 31;", "@go bra done;"]
    lines = [
        ".reg .pred go; .reg .b64 since, now, told, name;",
        declared(words),
        ".reg .u32 turns, late;",
        "mov.u32 turns, 0; mov.u64 since, 0;",
        *([*(f"mov.u32 bits{k}, 0;" for k in each), *not_first_warp] if is_alone else []),
        "again:",
        *loading(words, words),
        *polling(words, epoch, report, "leave"),
        # a word of a later launch: its rank has given up an earlier one; older ones may be of any age
        *(
            f"sub.u32 late, found{k}, {epoch}; sub.u32 late, late, 1; setp.lt.u32 go, late, {LATER}; @go bra gone;"
            for k in each
        ),
        *until(limit),
        "gone:",
        *reporting(words, pack * of_each, epoch, report, place, names),
        "leave:",
        *_without_late(words, epoch),
        "done:",
        *given(words),
    ]
    arguments = pointers(count) | {"epoch": "r"}
    waiting = assembled(lines, arguments | _OF_WAIT, results=count, pack=pack, is_returned=not is_alone)
    if not is_alone:
        return documented(name, parameters, _ALL_HAVE, [_place("epoch"), waiting])
    taking = [
        ".reg .pred go;",
        declared(count),
        *loading(count, count),
        *_without_late(count, f"${2 * count}"),
        *given(count),
    ]
    taken = assembled(taking, arguments, results=count, is_returned=True)
    body = [_place("epoch"), waiting, "tl.debug_barrier()", taken]
    return documented(name, parameters, f"{_ALL_HAVE}\n\n{_ONE_WARP}\n", body)


def _without_late(words: int, epoch: str) -> list[str]:
    """NaN for what has not come."""
    return [f"setp.ne.u32 go, found{k}, {epoch}; @go mov.u32 bits{k}, {NAN};" for k in range(words)]


# rows that ranks exchange


def post_turn_text(name: str, peers: int, *, interpret: bool) -> str:
    """The function that stores a turn at so many flags, by the first thread, behind one fence."""
    if interpret:
        return interpreted_post(name, peers)
    lines = [
        ".reg .pred other; .reg .u32 thread;",
        "mov.u32 thread, %tid.x; setp.ne.u32 other, thread, 0;",
        "@other bra done;",
        "fence.acq_rel.sys;",
        *(f"st.relaxed.sys.global.u32 [${k + 1}], ${peers + 1};" for k in range(peers)),
        "done:",
        DONE,
    ]
    says = "What the program has stored is seen by whoever sees ``turn`` at the flags."
    posting = assembled(lines, pointers(peers) | {"turn": "r"})
    return documented(name, [*pointers(peers), "turn"], says, ["tl.debug_barrier()", posting])


def await_turn_text(name: str, peers: int, *, interpret: bool) -> str:
    """The function that waits for so many flags: the first thread polls, and the others wait for it."""
    if interpret:
        return interpreted_await_rows(name, peers)
    each = range(peers)
    turn, limit, report, place, names = (f"${peers + k}" for k in range(1, 6))
    waiting = [
        f".reg .pred go; .reg .b64 since, now, told, name; .reg .u32 found<{peers}>, turns, late;",
        "mov.u32 turns, 0; mov.u64 since, 0;",
        "mov.u32 late, %tid.x; setp.ne.u32 go, late, 0;",
        "@go bra done;",
        "again:",
        *(f"ld.acquire.sys.global.u32 found{k}, [${k + 1}];" for k in each),
        *polling(peers, turn, report, "done"),
        *(f"setp.eq.s32 go, found{k}, {GONE}; @go bra gone;" for k in each),
        *until(limit),
        "gone:",
        *reporting(peers, 1, turn, report, place, names),
        "done:",
        DONE,
    ]
    looking = [
        f".reg .pred late; .reg .u32 found<{peers}>, any;",
        "mov.u32 any, 0;",
        *(f"ld.relaxed.sys.global.u32 found{k}, [${k + 1}];" for k in each),
        *(f"setp.ne.u32 late, found{k}, {turn}; @late mov.u32 any, 1;" for k in each),
        "mov.u32 $0, any;",
    ]
    arguments = pointers(peers) | {"turn": "r"}
    body = [
        _place("turn"),
        assembled(waiting, arguments | _OF_WAIT),
        "tl.debug_barrier()",
        assembled(looking, arguments, is_returned=True),
    ]
    says = "Wait until every flag is ``turn``.  Returns whether one is not, after the limit."
    return documented(name, [*pointers(peers), "turn", *_WAITED], says, body)


# words that programs of a GPU exchange


NO_WAIT = documented("wait_for", ["ptr", "come", "count"], "Go on, whoever has come.", [])
"""``wait_for`` of ``kernel_functions/gpu_functions.py`` where members of a group run one after the other."""


def post_polled_text(*, by_one: bool) -> str:
    """``by_one``: one thread stores a word; else every thread that has it, the same bits in one transaction a warp."""
    lines = [".reg .b64 word;", "mov.b64 word, {$2, $3};"]
    if by_one:
        lines = [".reg .pred first;", ".reg .u32 thread;", *lines, *FIRST_THREAD]
    lines += [f"{'@first ' if by_one else ''}st.relaxed.gpu.global.b64 [$1], word;", DONE]
    body = ["bits = value.to(tl.int32, bitcast=True)", assembled(lines, {"ptr": "l", "bits": "r", "epoch": "r"})]
    return documented("post", ["ptr", "epoch", "value"], _POSTED, body)


def collect_words_text(name: str, results: int, *, pack: int, interpret: bool) -> str:
    """``pack``: of each result, how many words a thread asks for at once."""
    parameters = [*pointers(results), "epoch"]
    if interpret:
        bits = ", ".join(f"(tl.load(ptr{k}) & 0xFFFFFFFF).to(tl.int32)" for k in range(results))
        return documented(name, parameters, _AS_THEY_ARE, [f"return {bits}"])
    words = results * pack
    lines = [".reg .pred wrong;", f".reg .b64 word<{words}>;"]
    lines += [f".reg .u32 bits<{words}>, found<{words}>;", "again:"]
    lines += [f"ld.relaxed.gpu.global.b64 word{k}, [${words + k}];" for k in range(words)]
    for k in range(words):
        lines.append(f"mov.b64 {{bits{k}, found{k}}}, word{k};")
        lines.append(f"setp.ne{'.or' if k else ''}.u32 wrong, found{k}, ${2 * words}{', wrong' if k else ''};")
    lines += ["@wrong bra again;", *given(words)]
    collecting = assembled(lines, pointers(results) | {"epoch": "r"}, results=results, pack=pack, is_returned=True)
    return documented(name, parameters, _COLLECTED, [collecting])
