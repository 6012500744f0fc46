#!/usr/bin/env bash
# On 4 GPUs, from the root: nvFuser's overlap tests that were not reached and this part's own; then benchmarks and transformer. < 110 s.
export PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
out=${OUT:-/tmp/overlap4}
mkdir -p "$out"
python3 -c 'import pytest' 2>/dev/null || { . scripts/environment.sh 2>/dev/null; prepare test mpi; set +euo pipefail; export PATH=$venv/bin:$PATH; }
suite() { OUT=$out/$1 timeout "$2" python3 .nvfuser_multidevice/run_suite.py -n 4 --total "$(($2 - 4))" --file-limit "$(($2 - 4))" --limit 60 -k "$3" "$4" >"$out/$1.txt" 2>&1; }
show() { echo "##### $1 at $SECONDS s"; cat "$out/$1.txt"; tail -n "${2:-25}" "$out/$1"/*.log 2>/dev/null; awk -F'\t' '{print $1, $2, $4}' "$out/$1/results.tsv"; }
suite counted 45 '(test_column_parallel_linear_forward or overlap_allgather or no_overlap) and not benchmark and not reference' python/multidevice/test_overlap.py &
(
    export PYTHONPATH=$PWD:$PWD/tests OMP_NUM_THREADS=4
    timeout 45 python3 -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 4 -m pytest -q -p no:cacheprovider --color=no -m "" tests/multirank/test_overlap.py >"$out/own.txt" 2>&1
) &
wait
show counted 40
echo "##### own"; grep -v -i warning "$out/own.txt" | tail -40
left=$((106 - SECONDS))
suite benchmarks "$left" '(test_row_parallel_linear_forward_benchmark and (2 or 4)) or test_column_parallel_linear_forward_benchmark' python/multidevice/test_overlap.py &
suite transformer "$left" 'backward or SEQUENCE' python/multidevice/test_transformer.py &
wait
show benchmarks 15
show transformer 25
