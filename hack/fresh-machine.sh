#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Proves that make targets work on a fresh machine: makes the smallest Debian 12
# with nothing but git, make and this machine's Go, clones what is committed
# here, and runs the targets inside as root.
#
#   hack/fresh-machine.sh [-k] TARGET...      for example: build demo test
#
# -k keeps the file system and says where it is. Needs root and debootstrap.
# Mounts, processes and namespaces made inside end with it; the network and the
# kernel are this machine's. MIRROR names another Debian mirror.
set -euo pipefail

die() { printf 'fresh-machine: %s\n' "$*" >&2; exit 1; }
say() { printf 'fresh-machine: %s\n' "$*"; }

keep=
while getopts k flag; do
	case $flag in
	k) keep=1 ;;
	*) die "usage: hack/fresh-machine.sh [-k] TARGET..." ;;
	esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || die "usage: hack/fresh-machine.sh [-k] TARGET..."
[ "$(id -u)" = 0 ] || die "needs root"
command -v debootstrap >/dev/null || die "debootstrap is missing: apt-get install debootstrap"
top=$(cd "$(dirname "$0")/.." && pwd)
goroot=$(go env GOROOT)

root=$(mktemp -d "${TMPDIR:-/tmp}/fairlead-fresh-XXXXXX")
chmod 755 "$root"
cleanup() {
	[ -z "$keep" ] || { say "kept $root"; return; }
	rm -rf --one-file-system "$root"
}
trap cleanup EXIT

environment=(HOME=/root USER=root TERM=dumb LANG=C.UTF-8 PATH=/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
for name in GOPROXY GONOPROXY GOSUMDB GONOSUMDB GOPRIVATE; do
	value=$(go env "$name")
	[ -z "$value" ] || environment+=("$name=$value")
done
for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY CI FUZZTIME KERNELS METHODS FAIRLEAD_LIMIT; do
	[ -z "${!name+set}" ] || environment+=("$name=${!name}")
done

say "making a Debian 12 in $root"
debootstrap --variant=minbase --include=ca-certificates,git,make bookworm "$root" ${MIRROR:+"$MIRROR"} >"$root.log" 2>&1 ||
	{ tail -n 20 "$root.log" >&2; die "debootstrap failed"; }
rm -f "$root.log"
# What this machine needs to reach the network, a fresh one here needs too.
cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
apt-config dump | grep -E '^Acquire::(http|https|Check|ForceIP)' >"$root/etc/apt/apt.conf.d/90machine" || true
if compgen -G '/usr/local/share/ca-certificates/*.crt' >/dev/null; then
	cp /usr/local/share/ca-certificates/*.crt "$root/usr/local/share/ca-certificates/"
	env -i "${environment[@]}" chroot "$root" update-ca-certificates >/dev/null 2>&1 || die "update-ca-certificates failed"
fi
mkdir -p "$root/usr/local/go"
git clone -q "file://$top" "$root/root/fairlead"

{
	printf 'environment=('
	printf '%q ' "${environment[@]}"
	printf ')\ntargets=('
	printf '%q ' "$@"
	printf ')\n'
	cat <<'INSIDE'
set -eum
cd /root/fairlead
run() { env -i "${environment[@]}" make "$@"; }

# The demo runs until it is interrupted: wait for its port, ask it, end it.
demo() {
	local port='' left
	run demo >/tmp/demo 2>&1 &
	for ((i = 0; i < 600 && ${#port} == 0; i++)); do
		sleep 1
		kill -0 $! 2>/dev/null || break
		! grep -q ' active ' /tmp/demo || port=$(sed -nE 's|^ *curl http://127.0.0.1:([0-9]+)/.*|\1|p' /tmp/demo)
	done
	cat /tmp/demo
	[ -n "$port" ] || { echo "fresh-machine: the demo showed no port"; return 1; }
	exec 3<>"/dev/tcp/127.0.0.1/$port"
	printf 'GET / HTTP/1.0\r\n\r\n' >&3
	grep -m 1 '^HTTP/1.* 200 ' <&3
	exec 3>&-
	kill -INT -- -$!
	wait $! || true # make tells that it was interrupted
	left=$(ls -A /run/netns 2>/dev/null || true)
	[ -z "$left" ] || { echo "fresh-machine: the demo left network namespace $left"; return 1; }
}

for target in "${targets[@]}"; do
	printf '\n== make %s\n' "$target"
	if [ "$target" = demo ]; then demo; else run "$target"; fi
done
INSIDE
} >"$root/root/targets"

say "running make $*"
# Its own mounts and processes: when the first process ends, nothing is left of them.
unshare --mount --pid --fork --kill-child --propagation private -- bash -euc '
	mount --bind "$1" "$1" # so that its root is a mount point, as on a machine
	mount --bind "$2" "$1/usr/local/go"
	mount -o remount,bind,ro "$1/usr/local/go"
	mount -t proc proc "$1/proc"
	mount --rbind /sys "$1/sys"
	mount --rbind /dev "$1/dev"
	mount -t tmpfs run "$1/run"
	mkdir -p "$1/run/lock"
	exec chroot "$1" /bin/bash /root/targets' - "$root" "$goroot" </dev/null
say "done: make $*"
