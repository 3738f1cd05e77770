#!/usr/bin/env bash
# Does boot.sh keep its word? Three boots; exit 0 when it does, 77 when it cannot
# run here (prepare it first: boot.sh --prepare), 1 with the first thing amiss.
set -euo pipefail

boot=$(dirname "$(readlink -f "$0")")/boot.sh
"$boot" --check || exit

out=$(mktemp -d) pids=()
# shellcheck disable=SC2317  # called by trap
clean_up() {
    [ ${#pids[@]} = 0 ] || kill "${pids[@]}" 2>/dev/null || true
    wait
    rm -rf "$out"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

amiss() {
    echo "FAIL $*" >&2
    tail -n 40 "$out"/* >&2
    exit 1
}
passed() { echo "ok   $* ($((SECONDS - since)) s)"; since=$SECONDS; }
since=$SECONDS

# shellcheck disable=SC2016  # for the guest's shell
devices='
set -eu
for i in 0 1; do
    ibv_devinfo -d "rxe$i" | grep -q "state:.*PORT_ACTIVE" || { echo "rxe$i is not active"; exit 1; }
    ibv_devinfo -v -d "rxe$i" | grep -q "GID\[  1\]:.*::ffff:10\.9\.0\.$((i + 1)), RoCE v2" ||
        { echo "rxe$i: GID 1 is not RoCE v2 on 10.9.0.$((i + 1))"; exit 1; }
done
[ "$(ulimit -l)" = unlimited ] || { echo "memlock is limited"; exit 1; }
[ "$GREETING" = "a word, '\''quoted'\''" ] || { echo "GREETING is $GREETING"; exit 1; }
: "$(cat <(echo "/dev/fd works"))"
ibv_rc_pingpong -d rxe0 -g 1 -n 200 >"$TMPDIR/server" &
for try in 1 2 3 4 5 6 7 8 9; do
    sleep 1
    ibv_rc_pingpong -d rxe0 -g 1 -n 200 10.9.0.1 2>&1 && break
    [ "$try" != 9 ] || exit 1
done
wait $!
echo "to stderr" >&2
exit 7
'
got=0
"$boot" -t 180 -e "GREETING=a word, 'quoted'" -- bash -c "$devices" >"$out/one" 2>"$out/one.err" || got=$?
[ "$got" = 7 ] || amiss "devices: exit $got, not 7"
grep -q '200 iters' "$out/one" || amiss 'devices: ibv_rc_pingpong said nothing'
[ "$(cat "$out/one.err")" = 'to stderr' ] || amiss 'stderr is not that of the command alone'
took=$((SECONDS - since))
passed 'rxe0 and rxe1 active, ibv_rc_pingpong on rxe0, exit status 7, output apart'

got=0
"$boot" -t $((took + 20)) -- bash -c 'echo going; sleep 1000' >"$out/time" 2>"$out/time.err" &
pids=($!)
until grep -q going "$out/time"; do
    kill -0 "${pids[0]}" 2>/dev/null || break
    sleep 0.5
done
kill -0 "${pids[0]}" 2>/dev/null || amiss 'time limit: no output before the end'
wait "${pids[0]}" || got=$?
pids=()
[ "$got" = 124 ] || amiss "time limit: exit $got, not 124"
passed 'output while it runs, exit status 124 when the time is up'

port=$((20000 + RANDOM % 10000))
# shellcheck disable=SC2016  # for the guests' shells
{
    first='set -e; ping -c 3 10.9.1.2 || [ $? = 127 ]; ibv_rc_pingpong -d rxe2 -g 1 -n 200'
    second='set -e; ping -c 3 10.9.1.1 || [ $? = 127 ]; for try in 1 2 3 4 5 6 7 8 9; do sleep 1
            if ibv_rc_pingpong -d rxe2 -g 1 -n 200 10.9.1.1; then sleep 2; exit 0; fi; done; exit 1'
}
"$boot" -t 240 -m 1024 -c 1 -p "listen:$port" -- bash -c "$first" >"$out/first" 2>&1 &
pids=($!)
"$boot" -t 240 -m 1024 -c 1 -p "connect:$port" -- bash -c "$second" >"$out/second" 2>&1 &
pids+=($!)
for pid in "${pids[@]}"; do
    wait "$pid" || amiss "two guests: exit $?"
done
pids=()
for guest in first second; do
    grep -q '200 iters' "$out/$guest" || amiss "two guests: no ibv_rc_pingpong in the $guest"
done
passed 'two guests reach each other, by IP and by ibv_rc_pingpong on rxe2'
