#!/usr/bin/env bash
# Compiles the core and its unit tests for 64-bit ARM, and runs them under QEMU. Where there is no cross
# compiler or no emulator this says so and is a skip: KVZC_AARCH64=required makes that a failure.
#
# It shows that the code is portable, not that its memory orders are right: the emulator keeps the order
# of the machine that it runs on.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tests/aarch64
build=build/aarch64

skip() {
    echo "test-aarch64: SKIPPED: $1"
    [ "${KVZC_AARCH64:-}" != required ] || exit 1
    exit 0
}

command -v aarch64-linux-gnu-g++ >/dev/null || skip 'no cross compiler (g++-aarch64-linux-gnu)'

# The headers of verbs are the same for every machine, but lie among some that are not.
options=(-DKVZC_TESTS=ON -DKVZC_WERROR=ON -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O2)
if [ -e /usr/include/infiniband/verbs.h ]; then
    mkdir -p $build/verbs
    ln -sfn /usr/include/infiniband /usr/include/rdma $build/verbs
    options+=(-DKVZC_RDMA=ON -DKVZC_VERBS_INCLUDE="$PWD/$build/verbs")
fi
cmake -S . -B $build -G Ninja -DCMAKE_TOOLCHAIN_FILE="$PWD/$here/toolchain.cmake" "${options[@]}"
cmake --build $build --target kvzc_unit

command -v qemu-aarch64 >/dev/null || skip 'it compiles, but no emulator is here (qemu-user)'
declared=$(grep -v '^#' $here/skips.txt)
echo "$declared" | sed 's/^/not run under QEMU: /'
# Not by ctest, whose process per test is what emulation makes dear.
qemu-aarch64 -L /usr/aarch64-linux-gnu $build/kvzc_unit --gtest_brief=1 \
    --gtest_filter="-$(cut -d : -f 1 <<<"$declared" | paste -sd :)"
