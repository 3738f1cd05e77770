#!/usr/bin/env bash
# The tests of the rdma transport, on Soft-RoCE. Where no guest can be booted this says why and is a
# skip: KVZC_SOFTROCE=required makes that a failure.
set -euo pipefail
cd "$(dirname "$0")/../.."
boot=tests/softroce/boot.sh

status=0
$boot --prepare || status=$?
if [ $status = 77 ] && [ "${KVZC_SOFTROCE:-}" != required ]; then
    echo "test-rdma: SKIPPED: no Soft-RoCE guest can be booted here, for the reason above"
    exit 0
fi
[ $status = 0 ] || exit $status

# Emulated, everything is a hundred times slower: fewer rounds, and of the second and third system only
# what their small sizes and the way by TCP change.
fewer=PutTest.*:ScatterTest.*:GetTest.*:ArrivalTest.*:BackpressureTest.*:GrantTest.*:KillTest.*:CancelTest.*
small=$(sed 's,\(^\|:\)\([A-Za-z]*\)\.\*,\1\2.*/rdma_small_processes,g' <<<"$fewer")
hosts=$(sed 's,\(^\|:\)\([A-Za-z]*\)\.\*,\1\2.*/rdma_hosts_processes,g' <<<'ProofTest.*:RestartTest.*:DeathTest.*:KillTest.*')
filter="*/rdma_processes:$small:$hosts:RailTest.*"
# GoogleTest is content with no test at all, as where the guest has no device.
$boot -t 900 -e KVZC_ROUNDS="${KVZC_ROUNDS:-5}" -e PYTHONPATH=tests/python -- sh -c "
    [ \$(build/core/kvzc_conformance --gtest_list_tests --gtest_filter='$filter' | grep -c /rdma) -ge 150 ] &&
    build/core/kvzc_conformance --gtest_brief=1 --gtest_filter='$filter' &&
    [ \$(build/core/kvzc_rdma_faults --gtest_list_tests | grep -c '^  ') -ge 40 ] &&
    build/core/kvzc_rdma_faults --gtest_brief=1 &&
    .venv/bin/python -m pytest -p no:cacheprovider tests/softroce/test_rdma_guest.py"
# Two guests as two hosts: started from here, each runs one process.
.venv/bin/python -m pytest -p no:cacheprovider -rs tests/softroce/hosts
