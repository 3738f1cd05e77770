#!/usr/bin/env bash
# Run one command on a machine that has RDMA verbs, without any RDMA hardware: a
# Debian kernel with Soft-RoCE (rdma_rxe) in QEMU, on this machine's own files.
# README.md in this folder says what the guest offers and what it cannot do.
set -euo pipefail

readonly prog=${0##*/}

usage() {
    cat <<'TEXT'
usage: boot.sh [OPTION ...] [--] COMMAND [ARG ...]
       boot.sh --check
       boot.sh --prepare [--with-perftest]

Boots a guest with two Soft-RoCE devices and runs COMMAND in it as root, in the
current folder. Prepares itself (see --prepare) when that was not done before.

  -t SECONDS       time limit for boot and command together (default 300)
  -m MIB           memory of the guest (default 4096)
  -c CPUS          processors of the guest (default: this machine's, at most 4)
  -e NAME[=VALUE]  set NAME in the guest; without =VALUE, to what it is here
  -p listen:PORT   be the first of two hosts on one wire: adds rxe2, 10.9.1.1
  -p connect:PORT  be the second of the two:              adds rxe2, 10.9.1.2
  --console FILE   keep what the guest kernel printed in FILE
  --check          say whether a boot can run here as things are; exit 0 or 77
  --prepare        install what is missing, fetch the kernel, build the initramfs
  --with-perftest  with --prepare: install perftest (ib_write_bw and its kin) too

Environment: KVZC_SOFTROCE_ENV (names to pass on, as by -e NAME, split at blanks
or commas), KVZC_SOFTROCE_CACHE (default ~/.cache/kvzc-softroce),
KVZC_SOFTROCE_ACCEL (kvm or tcg; default: kvm where it works, else tcg).

Exit status: COMMAND's own; 77 cannot run here (one line says why); 124 the time
was up while COMMAND ran; 125 the guest did not come up, or went down under it.
TEXT
}

say() { printf '%s: %s\n' "$prog" "$*" >&2; }
cannot() { say "cannot run here: $*"; exit 77; }
misuse() { say "$*; --help tells more"; exit 125; }

# depmod, ip and the like are in sbin, which not every user's PATH has.
export PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

cache=${KVZC_SOFTROCE_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/kvzc-softroce}
cache=$(realpath -m -- "$cache")
# One folder a layout of the cache: raise the number when build_image changes.
readonly image=$cache/image-1
readonly boot_limit=120 peer_limit=90

# ---------------------------------------------------------------- preparation

# Debian packages that this machine lacks. The guest runs on this machine's
# files, so the tools it calls (ip, rdma, ibv_*) have to be here.
missing_packages() {
    local pair
    for pair in qemu-system-x86_64:qemu-system-x86 cpio:cpio depmod:kmod \
                rdma:iproute2 ibv_devinfo:ibverbs-utils setpriv:util-linux; do
        command -v "${pair%%:*}" >/dev/null || echo "${pair##*:}"
    done
    compgen -G '/usr/lib*/x86_64-linux-gnu/libibverbs/librxe-rdmav*.so' >/dev/null ||
        compgen -G '/usr/lib*/libibverbs/librxe-rdmav*.so' >/dev/null ||
        echo ibverbs-providers
}

can_install() {
    [ "$EUID" = 0 ] && [ -e /etc/debian_version ] && command -v apt-get >/dev/null
}

image_ready() { [ -s "$image/kernel" ] && [ -s "$image/initrd" ]; }

# One line that says why a boot cannot run as things are; nothing when it can.
obstacle() {
    local missing hint="run $prog --prepare"
    [ "$(uname -sm)" = 'Linux x86_64' ] || { echo "needs Linux on x86-64, this is $(uname -sm)"; return; }
    missing=$(missing_packages | tr '\n' ' ')
    if [ -n "$missing" ]; then
        can_install || hint='install them (no root, or no apt, to do it from here)'
        echo "packages missing: ${missing% }; $hint"
    elif ! image_ready; then
        echo "no kernel in $cache yet; $hint"
    fi
}

apt_updated=
apt_update() {
    [ -z "$apt_updated" ] && [ "$EUID" = 0 ] || return 1
    apt_updated=yes
    # A third-party source that is down must not stop us: what follows decides.
    apt-get update -qq >/dev/null 2>&1 || true
}

apt_install() {
    local try='apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300'
    export DEBIAN_FRONTEND=noninteractive
    $try "$@" </dev/null >/dev/null 2>&1 && return
    apt_update || true
    $try "$@" </dev/null >/dev/null
}

# fetch PACKAGE FOLDER: unpack PACKAGE below FOLDER, without installing it.
fetch() {
    local scratch
    scratch=$(mktemp -d "$work/deb.XXXXXX")
    (
        cd "$scratch"
        get() { apt-get download -qq -o APT::Sandbox::User=root "$1" >/dev/null 2>"$work/apt.log"; }
        get "$1" || { apt_update && get "$1"; } || { cat "$work/apt.log" >&2; exit 1; }
    ) || return
    dpkg -x "$scratch"/*.deb "$2" && rm -rf "$scratch"
}

# The package of the newest kernel, found through the distribution's meta package.
kernel_package() {
    local meta
    for meta in linux-image-amd64 linux-image-generic; do
        apt-cache depends "$meta" 2>/dev/null |
            awk '$1 == "Depends:" && $2 ~ /^linux-image-[0-9]/ {print $2; exit}'
    done | head -n 1
}

# unpack_kernel VMLINUZ TO: the kernel inside, which QEMU enters directly (PVH).
# To let the guest decompress itself costs as long again as all the rest of its
# boot under emulation. Fails where the kernel is packed or built another way.
unpack_kernel() {
    local magic at
    for magic in '\xfd7zXZ\x00 xz' '\x28\xb5\x2f\xfd zstd' '\x1f\x8b\x08 gzip'; do
        at=$(LC_ALL=C grep -abPo -m 1 "${magic% *}" "$1" 2>/dev/null | tr -d '\0' | head -n 1 | cut -d : -f 1) || true
        [ -n "$at" ] || continue
        # All of them complain of what follows the packed kernel.
        tail -c "+$((at + 1))" "$1" | "${magic##* }" -dcq >"$2" 2>/dev/null || true
        echo quit | timeout 20 qemu-system-x86_64 -accel tcg -cpu max -nodefaults -display none \
            -S -monitor stdio -kernel "$2" >/dev/null 2>&1 && return
    done
    rm -f "$2"
    return 1
}

# Fills $work/image with the kernel and an initramfs that holds busybox, the
# modules in the order to load them, and an init that hands over to the job.
build_image() {
    local package release module path tree=$work/tree root=$work/root out=$work/image
    mkdir -p "$tree/bin" "$tree/modules" "$root" "$out"

    package=$(kernel_package)
    [ -n "$package" ] || { apt_update && package=$(kernel_package); }
    [ -n "$package" ] || { say 'apt knows no package linux-image-amd64'; return 1; }
    # Unpacked, not installed: installing would touch this machine's boot files,
    # and busybox-static would replace an installed busybox.
    fetch busybox-static "$root" || return
    fetch "$package" "$root" || return
    release=${package#linux-image-}
    release=${release#unsigned-}
    if ! [ -d "$root/lib/modules/$release/kernel/drivers/infiniband" ]; then
        # Ubuntu keeps the modules apart.
        fetch "linux-modules-$release" "$root" || return
        fetch "linux-modules-extra-$release" "$root" || return
    fi
    unpack_kernel "$root/boot/vmlinuz-$release" "$out/kernel" ||
        cp "$root/boot/vmlinuz-$release" "$out/kernel" || return
    cp "$(find "$root" -name busybox -type f -perm -u+x | head -n 1)" "$tree/bin/busybox" || return

    depmod -b "$root" "$release" || return
    # modprobe does not see that rdma_rxe asks the crypto layer for crc32:
    # without crc32_generic, adding a link fails. Kernels from 6.14 do not have
    # it, nor need it.
    for module in virtio_pci 9p 9pnet_virtio virtio_net virtio_rng dummy \
                  crc32_generic ib_uverbs rdma_ucm rdma_rxe; do
        modprobe -d "$root" -S "$release" --show-depends "$module" 2>"$work/modprobe.log" || {
            [ "$module" = crc32_generic ] && continue
            cat "$work/modprobe.log" >&2
            return 1
        }
    done >"$work/depends" || return
    awk '$1 == "insmod" && !seen[$2]++ {print $2}' "$work/depends" | while read -r path; do
        module=$(basename "$path")
        case $path in       # busybox insmod reads no compressed module
            *.xz) module=${module%.xz}; xz -dc "$path" >"$tree/modules/$module" ;;
            *.zst) module=${module%.zst}; zstd -dcq "$path" >"$tree/modules/$module" ;;
            *.gz) module=${module%.gz}; gzip -dc "$path" >"$tree/modules/$module" ;;
            *) cp "$path" "$tree/modules/" ;;
        esac || exit
        echo "$module"
    done >"$tree/modules/order" || return

    cat >"$tree/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mkdir -p /proc /sys /dev /job /host
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module"; done </modules/order
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 job /job && . /job/guest
poweroff -f
INIT
    chmod 755 "$tree/init"
    # Not compressed: unpacking it under emulation costs more than reading it.
    (cd "$tree" && find . | cpio --quiet -o -H newc -R 0:0) >"$out/initrd" || return
    echo "$release" >"$out/release"
}

prepare() {
    local missing lock
    [ "$(uname -sm)" = 'Linux x86_64' ] || cannot "$(obstacle)"
    mkdir -p "$cache" || cannot "$cache cannot be written"
    exec {lock}>"$cache/lock"
    flock "$lock"
    missing=$(missing_packages | tr '\n' ' ')
    if [ -n "$missing" ]; then
        can_install || cannot "$(obstacle)"
        say "installing ${missing% }"
        # shellcheck disable=SC2086  # a list of package names
        apt_install $missing || cannot "apt-get could not install ${missing% }"
        missing=$(missing_packages | tr '\n' ' ')
        [ -z "$missing" ] || cannot "still missing after its installation: ${missing% }"
    fi
    if ! image_ready; then
        { command -v apt-get && command -v dpkg; } >/dev/null ||
            cannot 'no kernel yet, and no apt-get to fetch one with'
        say "fetching a kernel into $cache"
        rm -rf "$cache"/new.*           # of a preparation that was killed
        work=$(mktemp -d "$cache/new.XXXXXX")
        build_image || cannot 'the kernel could not be fetched and unpacked (see above)'
        rm -rf "$image"
        mv -T "$work/image" "$image"
        rm -rf "$work"
        work=
    fi
    exec {lock}>&-
}

# ----------------------------------------------------------------------- boot

# An accelerator that works. That /dev/kvm opens says little: some sandboxes have
# it without the processor's part, and a guest then hangs before its first word.
accelerator() {
    case ${KVZC_SOFTROCE_ACCEL:-} in
        kvm | tcg) echo "$KVZC_SOFTROCE_ACCEL"; return ;;
        '') ;;
        *) misuse "KVZC_SOFTROCE_ACCEL is kvm or tcg" ;;
    esac
    if [ -r /dev/kvm ] && [ -w /dev/kvm ] && grep -qwE 'vmx|svm' /proc/cpuinfo &&
        echo quit | timeout 10 qemu-system-x86_64 -accel kvm -cpu max -nodefaults -display none \
            -S -monitor stdio >/dev/null 2>&1; then
        echo kvm
    else
        echo tcg
    fi
}

# What the initramfs runs, in busybox's shell: root is still the initramfs, this
# machine's files come to /host, the folder of this run is /job.
write_guest() {
    cat <<GUEST
name=$guest_name peer=$peer_address wire=$wire_address merged=$merged peer_limit=$peer_limit
GUEST
    cat <<'GUEST'
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

fail() {
    echo "$*" >/job/failure
    sync
    poweroff -f
}
# By env, as busybox's chroot takes its own applet for a bare name such as ip.
host() { chroot /host /usr/bin/env "$@" 2>&1; }

mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=mmap host /host ||
    fail 'the shared root file system does not mount'
mount -t proc proc /host/proc
mount -t sysfs sys /host/sys
mount -t devtmpfs dev /host/dev
mkdir -p /host/dev/shm /host/dev/pts
mount -t tmpfs -o mode=1777 tmpfs /host/dev/shm
mount -t devpts -o mode=620,ptmxmode=666 devpts /host/dev/pts
mount -t tmpfs -o mode=755 tmpfs /host/run
mkdir -m 1777 /host/run/tmp
# What udev makes elsewhere; bash's <(...) needs /dev/fd.
ln -s /proc/self/fd /host/dev/fd
for i in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${i%%:*}" "/host/dev/${i##*:}"; done

# A host of its own, to programs that ask who they are.
hostname "$name"
printf '127.0.0.1 localhost\n::1 localhost\n127.0.1.1 %s\n' "$name" >/run-hosts
[ -z "$wire" ] || printf '10.9.1.1 softroce-1\n10.9.1.2 softroce-2\n' >>/run-hosts
tr -d - </proc/sys/kernel/random/uuid >/run-machine-id
for i in hosts machine-id; do
    [ ! -f "/host/etc/$i" ] || mount --bind "/run-$i" "/host/etc/$i"
done

host ip -batch - <<NET || fail 'the network interfaces cannot be made'
link set lo up
link add roce0 type dummy
link add roce1 type dummy
addr add 10.9.0.1/24 dev roce0
addr add 10.9.0.2/24 dev roce1
link set roce0 up
link set roce1 up
NET
links='rxe0:roce0 rxe1:roce1'
if [ -n "$wire" ]; then
    host ip addr add "$wire/24" dev eth0 && host ip link set eth0 up || fail 'no wire: eth0 is not there'
    links="$links rxe2:eth0"
fi
for i in $links; do
    host rdma link add "${i%%:*}" type rxe netdev "${i##*:}" || fail "rdma link add ${i%%:*} failed"
done
# The kernel fills the GID table in the background.
for i in $links; do
    tries=0
    until grep -q '^0000:0000:0000:0000:0000:ffff:' "/sys/class/infiniband/${i%%:*}/ports/1/gids/1" 2>/dev/null; do
        tries=$((tries + 1))
        [ "$tries" -lt 100 ] || fail "${i%%:*} has no IPv4 GID at index 1"
        usleep 50000
    done
done

if [ -n "$peer" ]; then
    tries=0
    until ping -c 1 -W 1 "$peer" >/dev/null 2>&1; do
        tries=$((tries + 1))
        [ "$tries" -lt "$peer_limit" ] || fail "no answer from the other host, $peer"
        usleep 100000
    done
fi

echo >/job/started
if [ "$merged" = yes ]; then
    chroot /host /bin/bash /dev/fd/3 3</job/command </dev/null >>/job/stdout 2>&1
else
    chroot /host /bin/bash /dev/fd/3 3</job/command </dev/null >>/job/stdout 2>>/job/stderr
fi
echo $? >/job/status.new
mv /job/status.new /job/status
sync
poweroff -f
GUEST
}

# The command, for this machine's bash in the guest.
write_command() {
    local name
    echo 'exec 3<&-'
    printf 'ulimit -l unlimited; ulimit -n %q 2>/dev/null\n' "$(ulimit -n)"
    # Started by the kernel, so with next to no environment.
    printf 'export PATH=%q HOME=%q LANG=%q TERM=%q\n' \
        "$PATH" "${HOME:-/root}" "${LANG:-C.UTF-8}" "${TERM:-dumb}"
    echo 'export USER=root LOGNAME=root SHELL=/bin/bash KVZC_SOFTROCE=1'
    # The guest's own memory, as QEMU's 9p has no sockets, no FIFOs and no fstat
    # of an unlinked file: all three are wanted of temporary files.
    echo 'export TMPDIR=/run/tmp'
    for name in "${passed[@]}"; do
        case $name in
            *=*) printf 'export %s=%q\n' "${name%%=*}" "${name#*=}" ;;
            *) [ -z "${!name+set}" ] || printf 'export %s=%q\n' "$name" "${!name}" ;;
        esac
    done
    printf 'cd %q || exit 125\nexec' "$PWD"
    printf ' %q' "$@"
    echo
}

# True when something listens on the port: looked up, as to try would use up the
# one connection that QEMU takes.
listening() {
    grep -qiE "^ *[0-9]+: [0-9A-F]+:$(printf %04X "$1") [0-9A-F]+:0000 0A " /proc/net/tcp
}

job='' work='' qemu='' tails=()
# shellcheck disable=SC2317  # called by trap
clean_up() {
    trap '' INT TERM HUP
    if [ -n "$qemu" ] && kill -TERM "$qemu" 2>/dev/null; then
        wait "$qemu" 2>/dev/null || true
    fi
    [ ${#tails[@]} = 0 ] || kill "${tails[@]}" 2>/dev/null || true
    [ -z "$console" ] || [ -z "$job" ] || cp "$job/console" "$console" || true
    [ -z "$job" ] || rm -rf "$job"
    [ -z "$work" ] || rm -rf "$work"
}

boot() {
    local accel net=() ended=0 deadline limit=$boot_limit
    guest_name=softroce peer_address='' wire_address='' merged=no
    [ ! /dev/fd/1 -ef /dev/fd/2 ] || merged=yes

    accel=$(accelerator)
    [ "$accel" = kvm ] || accel=tcg,thread=multi
    if [ -n "$pair" ]; then
        case $pair in
            listen:*) guest_name=softroce-1 wire_address=10.9.1.1 peer_address=10.9.1.2 ;;
            connect:*) guest_name=softroce-2 wire_address=10.9.1.2 peer_address=10.9.1.1 ;;
        esac
        net=(-netdev "socket,id=wire,${pair%%:*}=127.0.0.1:${pair#*:}"
             -device "virtio-net-pci,netdev=wire,romfile=,mac=52:54:00:09:01:0${wire_address##*.}")
    fi

    job=$(mktemp -d "${TMPDIR:-/tmp}/kvzc-softroce.XXXXXX")
    write_guest >"$job/guest"
    write_command "$@" >"$job/command"
    : >"$job/stdout"
    : >"$job/stderr"
    : >"$job/console"

    [ "$time_limit" -ge "$limit" ] || limit=$time_limit
    deadline=$((SECONDS + limit))
    if [[ $pair == connect:* ]]; then
        until listening "${pair#*:}"; do
            [ "$SECONDS" -lt "$deadline" ] || { say "nothing listens on port ${pair#*:}"; exit 125; }
            sleep 0.2
        done
    fi

    # setpriv: should this script be killed outright, QEMU goes with it.
    setpriv --pdeathsig TERM timeout -k 5 "$time_limit" \
        qemu-system-x86_64 -accel "$accel" -cpu max -m "$memory" -smp "$cpus" \
        -nodefaults -display none -no-reboot -serial "file:${job//,/,,}/console" \
        -kernel "$image/kernel" -initrd "$image/initrd" \
        -append 'console=ttyS0 quiet panic=-1 oops=panic mitigations=off tsc=reliable cryptomgr.notests' \
        -device virtio-rng-pci "${net[@]}" \
        -virtfs local,path=/,mount_tag=host,security_model=none,multidevs=remap \
        -virtfs "local,path=${job//,/,,},mount_tag=job,security_model=none" \
        </dev/null >"$job/qemu" 2>&1 &
    qemu=$!
    tail -n +1 -s 0.1 --pid="$qemu" -f "$job/stdout" 2>/dev/null & tails+=($!)
    tail -n +1 -s 0.1 --pid="$qemu" -f "$job/stderr" >&2 2>/dev/null & tails+=($!)

    until [ -e "$job/started" ] || ! kill -0 "$qemu" 2>/dev/null; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            echo "not up within $limit s" >"$job/failure"
            kill -TERM "$qemu" 2>/dev/null || true
            break
        fi
        sleep 0.1
    done
    wait "$qemu" || ended=$?
    qemu=
    wait "${tails[@]}" 2>/dev/null || true
    tails=()

    if [ -s "$job/status" ]; then
        exit "$(cat "$job/status")"
    elif [ -e "$job/started" ] && [[ $ended == 124 || $ended == 137 ]]; then
        say "the time ($time_limit s) was up"
        exit 124
    elif [ -e "$job/started" ]; then
        say 'the guest went down while the command ran; its console:'
    else
        say "the guest did not come up: $(cat "$job/failure" 2>/dev/null || echo 'no word from it'); its console:"
    fi
    cat "$job/qemu" "$job/console" >&2
    exit 125
}

# -------------------------------------------------------------------- options

number() { [[ $2 =~ ^[1-9][0-9]{0,6}$ ]] || misuse "$1 takes a number above 0, not '$2'"; }

cpus=$(nproc)
[ "$cpus" -le 4 ] || cpus=4
time_limit=300 memory=4096 pair='' console='' mode=boot perftest='' passed=()
IFS=$' \t\n,' read -r -d '' -a passed <<<"${KVZC_SOFTROCE_ENV:-}" || true
while [ $# -gt 0 ]; do
    case $1 in
        -t | -m | -c | -e | -p | --console) [ $# -ge 2 ] || misuse "$1 needs a value" ;;
    esac
    case $1 in
        -t) number "$1" "$2"; time_limit=$2; shift ;;
        -m) number "$1" "$2"; memory=$2; shift ;;
        -c) number "$1" "$2"; cpus=$2; shift ;;
        -e) passed+=("$2"); shift ;;
        -p) [[ $2 =~ ^(listen|connect):[1-9][0-9]{0,4}$ ]] || misuse '-p takes listen:PORT or connect:PORT'
            pair=$2; shift ;;
        --console) console=$2; shift ;;
        --check) mode=check ;;
        --prepare) mode=prepare ;;
        --with-perftest) perftest=yes ;;
        -h | --help) usage; exit 0 ;;
        --) shift; break ;;
        -*) misuse "unknown option $1" ;;
        *) break ;;
    esac
    shift
done
for name in "${passed[@]}"; do
    [[ ${name%%=*} =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || misuse "not a variable's name: ${name%%=*}"
done

trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

case $mode in
    check)
        reason=$(obstacle)
        [ -z "$reason" ] || cannot "$reason"
        echo "ready: kernel $(cat "$image/release"), $(accelerator)"
        ;;
    prepare)
        prepare
        if [ -n "$perftest" ] && ! command -v ib_write_bw >/dev/null; then
            can_install || cannot 'package missing: perftest; install it (no root, or no apt, to do it from here)'
            apt_install perftest || cannot 'apt-get could not install perftest'
        fi
        ;;
    boot)
        [ $# -gt 0 ] || misuse 'no command given'
        [ -z "$(obstacle)" ] || prepare
        boot "$@"
        ;;
esac
