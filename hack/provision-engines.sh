#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Provides the real engines that `go run ./hack/stages test-engines` and `go run ./hack/stages test-moby` run against.
#
#   hack/provision-engines.sh            everything but cluster, apiserver, databases and moby
#   hack/provision-engines.sh packages   Debian's dockerd, containerd, runc, CNI plugins, etcd, Podman
#   hack/provision-engines.sh nerdctl    nerdctl, built from its module
#   hack/provision-engines.sh kube       kube-apiserver and kube-proxy, built from module k8s.io/kubernetes
#   hack/provision-engines.sh cluster    kubelet, kubectl and the control plane's other parts, built from the same module
#   hack/provision-engines.sh apiserver  kube-apiserver once more, built with optimisation, in bin/optimised: for measurements
#   hack/provision-engines.sh databases  PostgreSQL and Redis, for measurements
#   hack/provision-engines.sh moby       the next dockerd, whose firewall back end can be nftables, and runc for it
#
# What is built is kept in ${FAIRLEAD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fairlead}/bin
# under a stamp of its version, and is not built again. No engine is started.
set -euo pipefail

KUBE_VERSION=${KUBE_VERSION:-1.36.3}
NERDCTL_VERSION=${NERDCTL_VERSION:-1.7.7}
MOBY_VERSION=${MOBY_VERSION:-2.0.0-beta.24}
RUNC_VERSION=${RUNC_VERSION:-1.5.2}
CACHE=${FAIRLEAD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fairlead}
BIN=$CACHE/bin
JOBS=${JOBS:-$(nproc)}
# Not optimised: that compiles in half of the time, and no test asks for speed of an engine.
quick=(-p "$JOBS" -trimpath -gcflags='all=-N -l -dwarf=false' -ldflags='-s -w')
optimised=(-p "$JOBS" -trimpath -ldflags='-s -w')
POLICY=/usr/sbin/policy-rc.d
mkdir -p "$BIN" "$CACHE/src"

say() { printf '%s provision-engines: %s\n' "$(date +%H:%M:%S)" "$*" >&2; }

# with_progress NAME COMMAND...: a line every 20 s, the log's end on failure.
with_progress() {
	local name=$1 log=$CACHE/src/$1.log pid start=$SECONDS
	shift
	say "$name: started (log: $log)"
	"$@" >"$log" 2>&1 &
	pid=$!
	while kill -0 "$pid" 2>/dev/null; do
		sleep 1
		(((SECONDS - start) % 20 == 0)) && say "$name: $((SECONDS - start)) s"
	done
	if ! wait "$pid"; then
		say "$name: failed"
		tail -n 30 "$log" >&2
		return 1
	fi
	say "$name: done after $((SECONDS - start)) s"
}

# tried NAME COMMAND...: with_progress up to three times, for failures of the network.
tried() {
	local i
	for i in 1 2 3; do
		if with_progress "$@"; then return 0; fi
		((i == 3)) || { say "$1: again in $((i * 10)) s"; sleep $((i * 10)); }
	done
	say "$1: failed three times"
	return 1
}

# fetch_kube prints the path of the go.mod of Kubernetes.
fetch_kube() {
	local i
	for i in 1 2 3; do
		if go -C "$1" mod download -json "k8s.io/kubernetes@v$KUBE_VERSION" >"$1/fetched"; then
			sed -n 's/^.*"GoMod": "\(.*\)".*$/\1/p' "$1/fetched"
			return 0
		fi
		((i == 3)) || { say "kube: download failed, again in $((i * 10)) s"; sleep $((i * 10)); }
	done
	say "kube: download failed three times"
	return 1
}

stamped() { [[ -f $BIN/.$1 && $(<"$BIN/.$1") == "$2" ]]; }
stamp() { printf '%s' "$2" >"$BIN/.$1"; }

packages() {
	debian docker.io containerd runc containernetworking-plugins etcd-server podman netavark uidmap slirp4netns rootlesskit iptables nftables conntrack busybox-static iproute2
}

# debian NAME...: installs Debian's packages.
debian() {
	local missing=() p
	for p; do
		dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null | grep -qx installed || missing+=("$p")
	done
	if ((${#missing[@]} == 0)); then
		say "packages: present"
		return
	fi
	[[ $(id -u) == 0 ]] || { say "packages: ${missing[*]} are missing; run this as root, or install them"; return 1; }
	# Debian's maintainer scripts start daemons unless this file denies it.
	if [[ ! -e $POLICY ]]; then
		trap 'wait; rm -f "$POLICY"' EXIT # after apt-get, if this is killed
		trap 'exit 130' INT TERM HUP
		printf '#!/bin/sh\nexit 101\n' >"$POLICY"
		chmod 755 "$POLICY"
	fi
	# Another process may be installing; a second run completes what was interrupted.
	local rc=0 apt=(env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0)
	with_progress apt-update "${apt[@]}" update || true
	with_progress apt-install "${apt[@]}" install -y --no-install-recommends "${missing[@]}" ||
		with_progress apt-install-again "${apt[@]}" install -y --fix-broken --no-install-recommends "${missing[@]}" || rc=$?
	[[ -z $(trap -p EXIT) ]] || rm -f "$POLICY"
	trap - EXIT
	return $rc
}

nerdctl() {
	if stamped nerdctl "$NERDCTL_VERSION" && [[ -x $BIN/nerdctl ]]; then
		say "nerdctl: $NERDCTL_VERSION present"
		return
	fi
	local dir=$CACHE/src/nerdctl
	rm -rf "$dir" && mkdir -p "$dir"
	# The command has replace directives, so `go install` refuses it.
	cat >"$dir/go.mod" <<-EOM
		module fairlead.test/nerdctl

		go 1.22

		require github.com/containerd/nerdctl v$NERDCTL_VERSION
	EOM
	printf '//go:build tools\n\npackage tools\n\nimport _ "github.com/containerd/nerdctl/cmd/nerdctl"\n' >"$dir/tools.go"
	tried nerdctl nice env -C "$dir" GOFLAGS=-mod=mod CGO_ENABLED=0 \
		go build "${quick[@]}" -o "$BIN/" github.com/containerd/nerdctl/cmd/nerdctl
	stamp nerdctl "$NERDCTL_VERSION"
}

# build_kube NAME FOLDER COMMAND...: builds commands of Kubernetes into a folder with the flags in
# the array that flags names, stamped as NAME.
build_kube() {
	local name=$1 bin=$2 dir=$CACHE/src/$1 staging=v0.${KUBE_VERSION#1.} mod command present=true
	local -n build_flags=$flags
	shift 2
	for command; do [[ -x $bin/$command ]] || present=false; done
	if $present && stamped "$name" "$KUBE_VERSION"; then
		say "$name: $KUBE_VERSION present"
		return
	fi
	rm -rf "$dir" && mkdir -p "$dir" "$bin"
	mod=$(fetch_kube "$dir")
	{
		echo "module fairlead.test/kube"
		echo
		grep -E '^(go|godebug) ' "$mod" | head -n 1
		echo "require k8s.io/kubernetes v$KUBE_VERSION"
		# The staging modules live in the same repository; outside it, their published twins serve.
		sed -nE "s#^[[:space:]]+(k8s.io/[^ ]+) => ./staging.*#replace \1 => \1 $staging#p" "$mod"
	} >"$dir/go.mod"
	{
		printf '//go:build tools\n\npackage tools\n\nimport (\n'
		printf '\t_ "k8s.io/kubernetes/cmd/%s"\n' "$@"
		echo ')'
	} >"$dir/tools.go"
	# kubectl and the kubelet refuse to work without a version.
	tried "$name" nice env -C "$dir" GOFLAGS=-mod=mod CGO_ENABLED=0 go build "${build_flags[@]}" \
		-ldflags="-s -w -X k8s.io/component-base/version.gitVersion=v$KUBE_VERSION" -o "$bin/" "${@/#/k8s.io/kubernetes/cmd/}"
	stamp "$name" "$KUBE_VERSION"
}

kube() { flags=quick build_kube kube "$BIN" kube-apiserver kube-proxy; }

# apiserver takes as long as the others together. JOBS=1 leaves room for other work.
apiserver() { flags=optimised build_kube apiserver "$BIN/optimised" kube-apiserver; }

databases() { debian postgresql redis-server redis-tools; }

# cluster is what a node needs besides.
cluster() {
	debian containerd runc containernetworking-plugins etcd-server iptables busybox-static iproute2
	flags=quick build_kube cluster "$BIN" kube-controller-manager kube-scheduler kubectl kubelet
}

# moby has a folder of its own, which tests put before Debian's programs in PATH.
moby() {
	if stamped moby "$MOBY_VERSION $RUNC_VERSION" && [[ -x $BIN/moby/dockerd && -x $BIN/moby/runc ]]; then
		say "moby: $MOBY_VERSION present"
		return
	fi
	mkdir -p "$BIN/moby"
	tried moby nice env GOBIN="$BIN/moby" GOFLAGS= CGO_ENABLED=0 go install "${quick[@]}" \
		"github.com/moby/moby/v2/cmd/dockerd@v$MOBY_VERSION" "github.com/moby/moby/v2/cmd/docker-proxy@v$MOBY_VERSION"
	# Entering namespaces is C.
	debian gcc libc6-dev
	tried runc nice env GOBIN="$BIN/moby" GOFLAGS= CGO_ENABLED=1 go install "${quick[@]}" \
		"github.com/opencontainers/runc@v$RUNC_VERSION"
	stamp moby "$MOBY_VERSION $RUNC_VERSION"
}

if (($# == 0)); then
	set -- packages nerdctl kube
fi
for what in "$@"; do
	case $what in
	packages | nerdctl | kube | cluster | apiserver | databases | moby) "$what" ;;
	*)
		say "unknown part \"$what\": want packages, nerdctl, kube, cluster, apiserver, databases or moby"
		exit 2
		;;
	esac
done
say "ready in $BIN"
