#!/usr/bin/env bash
# Has Clang prove that what a mutex guards is touched under it: base/mutex.h says how it is told. Where
# there is no Clang this says so and is a skip: KVZC_CLANG=required makes that a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v clang++ >/dev/null || {
    echo "thread-safety: SKIPPED: no clang++"
    [ "${KVZC_CLANG:-}" != required ] || exit 1
    exit 0
}
mapfile -t files < <(find cpp/src -name '*.cc' | sort)
if ! [ -e /usr/include/infiniband/verbs.h ]; then
    mapfile -t files < <(printf '%s\n' "${files[@]}" | grep -vE '/(rdma|ibv)/')
fi
printf '%s\0' "${files[@]}" |
    xargs -0 -n 4 -P "${JOBS:-$(nproc)}" clang++ -std=c++20 -fsyntax-only -Wthread-safety -Werror \
        -Wno-unknown-warning-option -DKVZC_VERSION='""' -Icpp/include -Icpp/src
echo "thread-safety: ${#files[@]} files"
