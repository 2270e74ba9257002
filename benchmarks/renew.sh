#!/usr/bin/env bash
# Times this library again on one GPU in the suites below, or in those that are named; rows of other libraries stay as they are.
#
#     [BUDGET=SECONDS] benchmarks/renew.sh [SUITE ...]
#
# A suite takes at most BUDGET seconds, 300 if none is given, and up to 0.4 of it to compile; what is left over is not run.
set -euo pipefail
cd "$(dirname "$0")/.."

time_suite() { # SUITE FILE OPTION...
  tfla bench gpu "$1" --repeats 20 --warmup 5 --pause 0.005 --patience 0.3 --limit 60 --budget "${BUDGET:-300}" \
    --out "benchmarks/results/$2.json" "${@:3}"
}

SUITES="fig4 fig5 fig12 fig13 fig14 dims packed mamba host"
[ $# -gt 0 ] || set -- $SUITES
for suite in "$@"; do
  case $suite in
    fig4) time_suite fig4 fig4_own --only "tfla mLSTM" --sustained 0.4 ;;
    fig12) time_suite fig12 fig12_own --only "tfla mLSTM" --sustained 0 --lengths 512 2048 8192 16384 65536 ;;
    fig13) time_suite fig13 fig13_own --only "tfla mLSTM" --sustained 0 --lengths 512 2048 8192 65536 ;;
    fig14) time_suite fig14 fig14_own --only "tfla mLSTM" --sustained 0 ;;
    fig5 | packed) time_suite "$suite" "$suite" --only "tfla mLSTM" --sustained 0 ;;
    dims) time_suite dims dims --sustained 0 ;;
    mamba) time_suite mamba mamba --sustained 0.2 ;;
    host) time_suite host host_own --sustained 0.2 ;;
    delta) time_suite delta delta --sustained 0 ;;
    delta_decode) time_suite delta_decode delta_decode --sustained 0 ;;
    steps | generate | speculate | first_calls) time_suite "$suite" "$suite" --sustained 0 ;;
    train) time_suite train train --lengths 3 5 --sustained 0 ;;
    *) echo "renew: no suite '$suite'; there are $SUITES delta delta_decode steps generate speculate first_calls train" >&2; exit 2 ;;
  esac
done
