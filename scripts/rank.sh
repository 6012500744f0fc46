#!/usr/bin/env bash
# One rank of a test session: runs its arguments, a pytest command. mpirun stops all ranks as soon as one ends with a
# failure, which would cut off rank 0's report: a rank whose tests failed gives the others ten seconds to end as well.
code=0
"$@" || code=$?
touch "$MEETING_PLACE/$OMPI_COMM_WORLD_RANK"
if [[ $code == 1 || $code == 5 ]]; then # tests failed, or there were none; all else is a crash or a bad call
    for _ in {1..100}; do
        ended=("$MEETING_PLACE"/*)
        [[ ${#ended[@]} -lt $OMPI_COMM_WORLD_SIZE ]] || break
        sleep 0.1
    done
fi
exit "$code"
