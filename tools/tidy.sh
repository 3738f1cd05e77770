#!/usr/bin/env bash
# Runs clang-tidy, with what .clang-tidy says, on the core or on the files that are named. Where there is
# no clang-tidy this says so and is a skip: KVZC_TIDY=required makes that a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/tidy

command -v clang-tidy >/dev/null || {
    echo "tidy: SKIPPED: no clang-tidy"
    [ "${KVZC_TIDY:-}" != required ] || exit 1
    exit 0
}

# Nothing is built: only how it would be is looked at.
cmake -S . -B $build -G Ninja >/dev/null
files=("$@")
if [ ${#files[@]} = 0 ]; then mapfile -t files < <(find cpp/src -name '*.cc' | sort); fi
if ! [ -e /usr/include/infiniband/verbs.h ]; then
    mapfile -t files < <(printf '%s\n' "${files[@]}" | grep -vE '/(rdma|ibv)/')
fi
printf '%s\0' "${files[@]}" |
    xargs -0 -n 1 -P "${JOBS:-$(nproc)}" clang-tidy --quiet -p $build --extra-arg=-Wno-unknown-warning-option
echo "tidy: ${#files[@]} files"
