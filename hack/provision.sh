#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs what fairlead's tests need on Debian 12. Takes a second and no network if
# all of it is installed.
#
#   hack/provision.sh [base|generate|vm|kernels|arm64|wsl|boot|browser|gotestsum|lint|wine|all]...
#
# The default is all, which leaves kernels, arm64, wsl, boot and wine out.
#
# Packages need root; kernels and the linter go to a cache directory of the user:
# ${FAIRLEAD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fairlead}.
set -euo pipefail

# base: the race detector needs cgo; root tests make namespaces and rules, check units, and run curl.
base_packages=(curl gcc git iproute2 iptables kmod libc6-dev make nftables procps systemd)
# generate: the pinned compiler of the BPF programs, and the headers to refresh the vendored ones.
generate_packages=(clang-14 libbpf-dev llvm-14)
# vm: the emulator, and what goes into its file system.
vm_packages=(busybox-static iproute2 iptables kmod nftables qemu-system-x86 xz-utils)
# arm64: the emulator of such a machine. What goes into its file system is unpacked, not installed.
arm64_packages=(kmod qemu-system-arm xz-utils)
arm64_tools=(busybox-static iproute2 iptables nftables)
# wsl: what builds a kernel from source (hack/kernel-wsl).
wsl_packages=(bc bison flex gcc libc6-dev libelf-dev libssl-dev make pahole rsync xz-utils)
wsl_source=linux-source-6.12
# boot: what makes the file systems of machines that boot systemd or OpenRC (test/install).
boot_packages=(debootstrap e2fsprogs)
# wine: to run tests that were built for Windows, and what makes a library that its Go needs.
wine_packages=(binutils-mingw-w64-x86-64 wine64)
# browser: Chromium and a font for the page. Prometheus is unpacked beside it.
browser_packages=(chromium fonts-liberation2)
# The kernels that tests run on: the version, and the package that names the newest build of it.
kernels=(6.1:linux-image-cloud-amd64 6.12:linux-image-6.12-cloud-amd64)
arm64_kernels=(6.1-arm64:linux-image-cloud-arm64 6.12-arm64:linux-image-6.12-cloud-arm64)
# Other kernels to test on, each the newest of its suite unless the pinned build is still
# there: the version, the suite, the pinned build.
other_kernels=(5.10:bullseye:5.10.0-46-cloud-amd64 sid:sid:7.2.13+deb14-cloud-amd64)
# Debian systems to install packages in, beside what debootstrap calls minimal.
declare -A roots=(
	[systemd]="dbus,iproute2,kmod,libpam-systemd,procps,rpm,systemd,systemd-sysv,udev"
	[openrc]="iproute2,kmod,openrc,procps,udev"
)
lint_version=v2.15.0
gotestsum_version=v1.13.0

cache=${FAIRLEAD_CACHE:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/fairlead}

say() { printf 'provision: %s\n' "$*"; }
die() { printf 'provision: %s\n' "$*" >&2; exit 1; }

# retry WHAT COMMAND...: runs a command that needs the network up to three times.
retry() {
	local what=$1 try
	shift
	for try in 1 2 3; do
		if "$@"; then return 0; fi
		[ "$try" = 3 ] || { say "$what: failed, again in $((try * 10)) s"; sleep $((try * 10)); }
	done
	die "$what: failed three times"
}

tmp=
cleanup() { [ -z "$tmp" ] || rm -rf --one-file-system "$tmp"; }
trap cleanup EXIT
scratch() { [ -n "$tmp" ] || tmp=$(mktemp -d); }

# shellcheck disable=SC1091
os() { . /etc/os-release 2>/dev/null && printf '%s' "${ID:-unknown} ${VERSION_ID:-}"; }
[ "$(os)" = "debian 12" ] || die "needs Debian 12, this is '$(os)': use the Vagrantfile or a Debian 12 machine"
[ "$(dpkg --print-architecture)" = amd64 ] || die "needs amd64, this is $(dpkg --print-architecture)"

packages() {
	local missing=() p
	for p; do
		[ "$(dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing+=("$p")
	done
	[ ${#missing[@]} -gt 0 ] || return 0
	[ "$(id -u)" = 0 ] || die "packages are missing and only root installs them: run 'sudo hack/provision.sh' (missing: ${missing[*]})"
	say "installing ${missing[*]}"
	retry "install ${missing[*]}" install_packages "${missing[@]}"
}

# install_packages waits for other installations, as a fresh system may run one.
install_packages() {
	export DEBIAN_FRONTEND=noninteractive
	apt-get update -qq -o DPkg::Lock::Timeout=300 &&
		apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "$@" >/dev/null
}

# lists SUITE ARCHITECTURE reads package lists of its own, so that it needs neither root nor
# fresh lists of the system. For bookworm, the default, they are Debian's own sources as
# configured, plus the security archive beside them if that is not among them (debootstrap
# leaves it out). For another suite they are in the same archives.
lists() {
	local suite=${1:-bookworm} arch=${2:-amd64} dir
	[ "${apt_suite:-}" != "$suite-$arch" ] || return 0
	scratch
	dir=$tmp/apt-$suite-$arch
	mkdir -p "$dir/lists/partial" "$dir/archives/partial"
	chmod 755 "$tmp"
	local uri release
	while read -r uri release; do
		[ "$suite" = bookworm ] || release=$suite
		case $uri in
		*/debian | */debian-security) [ "$suite" != bookworm ] || printf 'deb %s %s main\n' "$uri" "$release" ;;
		esac
		case $uri in
		*/debian)
			printf 'deb %s %s main\n' "$uri" "$release"
			[ "$suite" = sid ] || printf 'deb %s-security %s-security main\n' "$uri" "${release%%-*}"
			;;
		esac
	done < <(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
		awk '$3 == "main" && $2 ~ /^bookworm/ { sub("/$", "", $1); print $1, $2 }') | sort -u >"$dir/sources.list"
	[ -s "$dir/sources.list" ] || die "no Debian bookworm source is configured for apt"
	apt_options=(-qq -o "Dir::State::Lists=$dir/lists" -o "Dir::Cache=$dir" -o "Dir::Etc::SourceList=$dir/sources.list"
		-o Dir::Etc::SourceParts=/dev/null -o Acquire::Languages=none -o APT::Sandbox::User=
		-o "APT::Architecture=$arch" -o "APT::Architectures=$arch")
	retry "read Debian's package lists of $suite, $arch" apt-get "${apt_options[@]}" update
	apt_suite=$suite-$arch
}

# download DIRECTORY PACKAGE puts the file of a package there.
download() { (cd "$1" && apt-get "${apt_options[@]}" download "$2"); }

# dependencies PACKAGE prints the packages that it depends on.
dependencies() { apt-cache "${apt_options[@]}" depends "$1" | awk '$1 == "Depends:" { print $2 }'; }

# kernel VERSION META ARCHITECTURE lays the newest build of a kernel into the cache: that
# which the package META of bookworm names.
kernel() {
	local version=$1 meta=$2 package
	[ ! -f "$cache/kernels/$version/release" ] || return 0
	lists bookworm "${3:-amd64}"
	package=$(dependencies "$meta" | grep -m1 '^linux-image-[0-9]' || true)
	[ -n "$package" ] || die "no package $meta in the configured Debian sources"
	lay_kernel "$version" "$package"
}

# other_kernel VERSION SUITE BUILD lays that build into the cache, or else the newest of the suite.
other_kernel() {
	local version=$1 suite=$2 package=linux-image-$3
	[ ! -f "$cache/kernels/$version/release" ] || return 0
	lists "$suite"
	if ! apt-cache "${apt_options[@]}" show "$package" >/dev/null 2>&1; then
		say "no $package in $suite any more: taking the newest"
		package=$(dependencies linux-image-cloud-amd64 | grep -m1 '^linux-image-[0-9]' || true)
		[ -n "$package" ] || die "no kernel in $suite"
	fi
	lay_kernel "$version" "$package"
}

# lay_kernel VERSION PACKAGE lays the kernel of a package into the cache. From Debian 14 on
# its parts are packages of their own, below /usr.
lay_kernel() {
	local version=$1 package=$2 release=${2#linux-image-} dir=$cache/kernels/$1 part
	say "fetching kernel $version: $package"
	mkdir -p "$tmp/$version" "$cache/kernels"
	rm -rf "$dir.new"
	for part in "$package" $(dependencies "$package" | grep -E '^linux-(base|binary|modules)-[0-9]' || true); do
		retry "download $part" download "$tmp/$version" "$part"
		dpkg-deb -x "$tmp/$version/$part"_*.deb "$dir.new"
	done
	if [ -d "$dir.new/usr/lib/modules" ]; then
		mkdir -p "$dir.new/lib"
		mv "$dir.new/usr/lib/modules" "$dir.new/lib/"
	fi
	if [ -f "$dir.new/lib/modules/$release/vmlinuz" ]; then
		mv "$dir.new/lib/modules/$release/vmlinuz" "$dir.new/vmlinuz"
	else
		mv "$dir.new/boot/vmlinuz-$release" "$dir.new/vmlinuz"
	fi
	# Most of it is not used.
	rm -rf "$dir.new/usr" "$dir.new"/boot/System.map-*
	PATH=$PATH:/usr/sbin:/sbin depmod -b "$dir.new" "$release"
	printf '%s\n' "$release" >"$dir.new/release"
	rm -rf "$dir"
	mv "$dir.new" "$dir"
}

# other_kernels lays each of them into the cache. One that cannot be had is left out, named in
# absent, and does not keep the others away.
other_kernels() {
	local k version suite build failed
	scratch # here, as a subshell would not remove it
	for k in "${other_kernels[@]}"; do
		IFS=: read -r version suite build <<<"$k"
		# In a condition "set -e" had no effect.
		set +e
		(
			set -e
			other_kernel "$version" "$suite" "$build"
		)
		failed=$?
		set -e
		[ "$failed" != 0 ] || continue
		say "kernel $version is left out: neither linux-image-$build nor the newest kernel of Debian's $suite came from the mirrors that apt is configured for"
		say "have apt use a mirror that has $suite, such as one of old suites, or put vmlinuz, lib/modules and a file release with the output of uname -r into $cache/kernels/$version"
		absent+=("$version (suite $suite)")
	done
}

# arm64_tree unpacks the tools for arm64, with all that they depend on, into $cache/roots/arm64.
# It is made again when the list of tools changes.
arm64_tree() {
	local dir=$cache/roots/arm64 file link
	[ "$(cat "$dir/packages" 2>/dev/null)" != "${arm64_tools[*]}" ] || return 0
	lists bookworm arm64
	say "fetching ${arm64_tools[*]} for arm64"
	: >"$tmp/nothing-installed"
	retry "download tools for arm64" apt-get "${apt_options[@]}" -o "Dir::State::Status=$tmp/nothing-installed" -o Debug::NoLocking=1 \
		-y --no-install-recommends --download-only install "${arm64_tools[@]}"
	rm -rf "$dir" "$dir.new"
	mkdir -p "$dir.new"
	for file in "$tmp"/apt-bookworm-arm64/archives/*_{arm64,all}.deb; do dpkg-deb -x "$file" "$dir.new"; done
	rm -rf "$dir.new"/usr/share "$dir.new"/var
	# Absolute links would lead to files of this machine.
	while read -r link; do
		ln -sfnr "$dir.new$(readlink "$link")" "$link"
	done < <(find "$dir.new" -type l -lname '/*')
	printf '%s\n' "${arm64_tools[*]}" >"$dir.new/packages"
	mv "$dir.new" "$dir"
}

# wsl_source unpacks the kernel's source into the cache.
wsl_source() {
	local dir=$cache/src/linux
	[ ! -f "$dir/Makefile" ] || return 0
	lists
	say "fetching $wsl_source"
	mkdir -p "$tmp/source" "$cache/src"
	retry "download $wsl_source" download "$tmp/source" "$wsl_source"
	dpkg-deb -x "$tmp/source"/*.deb "$tmp/source/root"
	rm -rf "$dir" "$dir.new"
	mkdir "$dir.new"
	tar -C "$dir.new" --strip-components 1 -xf "$tmp/source/root/usr/src/$wsl_source.tar.xz"
	mv "$dir.new" "$dir"
}

# root NAME makes $cache/roots/NAME.img, an ext4 file system of a fresh Debian 12 with that
# init. It is made again when its list of packages changes.
root() {
	local name=$1 include=${roots[$1]} dir=$cache/roots image tree
	image=$dir/$name-$(printf '1 %s' "$include" | sha256sum | cut -c1-12).img
	if [ ! -f "$image" ]; then
		[ "$(id -u)" = 0 ] || die "$image is missing and only root makes it: run 'sudo hack/provision.sh boot'"
		scratch
		tree=$tmp/$name
		say "making a Debian 12 with $name"
		retry "debootstrap" make_tree "$tree" "$include"
		rm -rf "$tree"/var/cache/apt/* "$tree"/var/lib/apt/lists/* "$tree"/usr/share/{doc,man,locale}
		printf 'guest\n' >"$tree/etc/hostname"
		printf '127.0.0.1 localhost guest\n::1 localhost\n' >"$tree/etc/hosts"
		printf '0123456789abcdef0123456789abcdef\n' >"$tree/etc/machine-id"
		printf '/dev/nvme0n1 / ext4 defaults 0 0\n' >"$tree/etc/fstab"
		mkdir -p "$dir" "$tree/test"
		PATH=$PATH:/usr/sbin:/sbin mke2fs -q -F -t ext4 -O ^has_journal -m 0 -d "$tree" "$image.new" 1G
		rm -rf --one-file-system "$tree"
		mv "$image.new" "$image"
	fi
	ln -sf "${image##*/}" "$dir/$name.img"
}

make_tree() {
	rm -rf --one-file-system "$1"
	PATH=$PATH:/usr/sbin:/sbin debootstrap --variant=minbase --include="$2" bookworm "$1" ${MIRROR:+"$MIRROR"} >"$tmp/debootstrap.log" 2>&1 ||
		{ tail -n 20 "$tmp/debootstrap.log" >&2; return 1; }
}

# prometheus unpacks Debian's Prometheus and promtool: installed, it would start
# a service on this machine.
prometheus() {
	local dir=$cache/prometheus
	[ ! -x "$dir/promtool" ] || return 0
	lists
	say "fetching prometheus"
	mkdir -p "$tmp/prometheus" "$cache"
	retry "download prometheus" download "$tmp/prometheus" prometheus
	dpkg-deb -x "$tmp/prometheus"/*.deb "$tmp/prometheus/root"
	rm -rf "$dir" "$dir.new"
	mkdir "$dir.new"
	cp "$tmp/prometheus/root/usr/bin/prometheus" "$tmp/prometheus/root/usr/bin/promtool" "$dir.new/"
	mv "$dir.new" "$dir"
}

# modules downloads the Go modules of the tests, so that no stage needs the network for them.
modules() {
	command -v go >/dev/null || die "no go in PATH: install Go first"
	retry "download the Go modules" go -C "$(dirname "$0")/.." mod download
	retry "download the Go modules of the tests" go -C "$(dirname "$0")/../test" mod download
	# The end-to-end tests build gvproxy.
	retry "download the modules of gvproxy" go -C "$(dirname "$0")/../test/gvproxy" mod download
}

build_tool() {
	GOBIN=$tmp/bin GOFLAGS=-buildvcs=false GOOS='' GOARCH='' go install -trimpath -ldflags '-s -w' "$1" \
		2> >(grep -v '^go: downloading' >&2)
}

# tool PACKAGE VERSION builds a command into the cache, once for each version of it and of Go.
tool() {
	local name=${1##*/} bin
	command -v go >/dev/null || die "no go in PATH: install Go first"
	bin=$cache/bin/$name-$2-$(go env GOVERSION)
	if [ ! -x "$bin" ]; then
		say "building $name $2"
		scratch
		retry "build $name" build_tool "$1@$2"
		mkdir -p "$cache/bin"
		cp "$tmp/bin/$name" "$bin.new"
		mv "$bin.new" "$bin"
	fi
	ln -sf "${bin##*/}" "$cache/bin/$name"
}

gotestsum() { tool gotest.tools/gotestsum "$gotestsum_version"; }
linter() { tool github.com/golangci/golangci-lint/v2/cmd/golangci-lint "$lint_version"; }

absent=() # kernels that could not be had
[ $# -gt 0 ] || set -- all
packages ca-certificates # what is fetched below comes over TLS
for section; do
	case $section in
	base) packages "${base_packages[@]}" ;;
	generate) packages "${generate_packages[@]}" ;;
	vm)
		packages "${vm_packages[@]}"
		for k in "${kernels[@]}"; do kernel "${k%%:*}" "${k#*:}"; done
		;;
	kernels)
		packages "${vm_packages[@]}"
		other_kernels
		;;
	arm64)
		packages "${arm64_packages[@]}"
		for k in "${arm64_kernels[@]}"; do kernel "${k%%:*}" "${k#*:}" arm64; done
		arm64_tree
		;;
	wsl)
		packages "${wsl_packages[@]}"
		for k in "${kernels[@]}"; do kernel "${k%%:*}" "${k#*:}"; done
		wsl_source
		;;
	boot)
		packages "${vm_packages[@]}" "${boot_packages[@]}"
		for k in "${kernels[@]}"; do kernel "${k%%:*}" "${k#*:}"; done
		for r in "${!roots[@]}"; do root "$r"; done
		;;
	browser)
		packages "${browser_packages[@]}"
		prometheus
		;;
	gotestsum) gotestsum ;;
	lint) linter ;;
	wine) packages "${wine_packages[@]}" ;;
	all)
		mapfile -t everything < <(printf '%s\n' "${base_packages[@]}" "${generate_packages[@]}" "${vm_packages[@]}" \
			"${browser_packages[@]}" | sort -u)
		packages "${everything[@]}"
		modules
		for k in "${kernels[@]}"; do kernel "${k%%:*}" "${k#*:}"; done
		prometheus
		gotestsum
		linter
		;;
	*) die "unknown section '$section': want base, generate, vm, kernels, arm64, wsl, boot, browser, gotestsum, lint, wine or all" ;;
	esac
done
[ ${#absent[@]} = 0 ] || die "not all is there: no kernel $(printf '%s, ' "${absent[@]}" | sed 's/, $//')"
say "ready"
