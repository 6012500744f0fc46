"""torchrun on this machine, which ends with the job's exit code and one line on the rank that failed, not a traceback.

Usage: python torchrun.py --nproc-per-node N SCRIPT [ARGS]
"""

import logging
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

LOCAL = [
    "--standalone",
    "--local-addr",
    "127.0.0.1",
]  # without an address it hangs where the host name does not resolve
INTERRUPTED = 128 + signal.SIGINT
SECONDS_TO_STOP = 3  # that the other ranks have after SIGTERM; torchrun's own 30 are fixed where a rank failed

close = PContext.close


def close_soon(context: PContext, death_sig: signal.Signals | None = None, timeout: int = SECONDS_TO_STOP) -> None:
    is_interrupted = death_sig == signal.SIGINT  # ranks may save what they have done
    close(context, death_sig, timeout if is_interrupted else min(timeout, SECONDS_TO_STOP))


def main(arguments: list[str]) -> int:
    logging.disable(logging.ERROR)  # torchrun's own; what it has to say is said below
    PContext.close = close_soon
    try:
        run.run(run.parse_args([*LOCAL, *arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return ended(f"rank {rank}", failure.exitcode)
    except SignalException as error:
        return ended("the run", -error.sigval)
    return 0


def ended(who: str, code: int) -> int:
    """Says how the run ended; `code` is negative for a signal, as `subprocess` has it. Returns the exit code."""
    if code in (-signal.SIGINT, INTERRUPTED):  # about which the job, or the terminal, has said its line
        return INTERRUPTED
    if code < 0:
        print(f"launch.sh: {who} was ended by {signal.Signals(-code).name}", file=sys.stderr)
        return 128 - code
    if code != 2:  # a bad call, about which the job has said its line
        print(f"launch.sh: {who} ended with exit code {code}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
