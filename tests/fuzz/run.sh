#!/usr/bin/env bash
# Lets libFuzzer look for inputs that break a promise, for so many seconds per target; then the corpus
# has them no matter what. What it finds besides is kept in build/fuzz/found, and `run.sh SECONDS merge`
# takes of that into tests/fuzz/corpus what covers more. Where there is no Clang with libFuzzer this says
# so and is a skip: KVZC_FUZZ=required makes that a failure.
#
#   run.sh SECONDS [merge] [TARGET...]
set -euo pipefail
cd "$(dirname "$0")/../.."
seconds=$1
shift
merge=
if [ "${1:-}" = merge ]; then merge=yes; shift; fi
build=build/fuzz
corpus=tests/fuzz/corpus

skip() {
    echo "fuzz: SKIPPED: $1"
    [ "${KVZC_FUZZ:-}" != required ] || exit 1
    exit 0
}

mkdir -p $build/found $build/broken
cxx=${FUZZ_CXX:-clang++}
echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
    "$cxx" -x c++ -fsanitize=fuzzer,address,undefined - -o $build/probe 2>/dev/null ||
    skip 'no Clang with libFuzzer and its sanitizers (clang, libclang-rt-dev)'

cmake -S . -B $build -G Ninja -DKVZC_FUZZ=ON -DKVZC_WERROR=ON -DCMAKE_CXX_COMPILER="$cxx"
cmake --build $build

# Other threads allocate meanwhile, so the leaks of one input cannot be told; those of all inputs are
# looked for by `make test-asan`.
options=(-detect_leaks=0 -timeout=60 -rss_limit_mb=3000 -max_len=1024 -print_final_stats=0 -verbosity=1)
failed=
targets=("$@")
if [ ${#targets[@]} = 0 ]; then
    for source in tests/fuzz/targets/*.cc; do targets+=("$(basename "$source" .cc)"); done
fi
for target in "${targets[@]}"; do
    program=$build/fuzz_$target
    [ -x "$program" ] || { echo "$target: not built here"; continue; }
    mkdir -p $build/found/"$target" $corpus/"$target"
    log=$build/$target.log
    if [ -n "$merge" ]; then
        # Anew, so that what no longer covers anything goes.
        fresh=$build/merged/$target
        rm -rf "$fresh" && mkdir -p "$fresh"
        "$program" "${options[@]}" -set_cover_merge=1 "$fresh" $corpus/"$target" $build/found/"$target" >"$log" 2>&1
        rm -rf "${corpus:?}/$target"
        mv "$fresh" $corpus/"$target"
        echo "$target: $(find $corpus/"$target" -type f | wc -l) inputs"
        continue
    fi
    if "$program" "${options[@]}" -max_total_time="$seconds" -artifact_prefix=$build/broken/"$target"- \
        $build/found/"$target" $corpus/"$target" >"$log" 2>&1; then
        echo "$target: $(grep -E 'DONE' "$log" | tail -n 1)"
    else
        failed+=" $target"
        echo "$target: BROKEN"
        tail -n 60 "$log"
    fi
done
[ -z "$failed" ] || { echo "fuzz: broken:$failed; inputs in $build/broken"; exit 1; }
