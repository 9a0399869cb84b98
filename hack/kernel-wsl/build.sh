#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds a kernel like WSL's for test/vm, from Debian's source of Linux 6.12: Debian's
# configuration without the modules that no test needs, and over it wsl.config. It takes 40
# minutes on 2 processors and 10 GB; the result stays in the cache as kernel "wsl".
#
#   hack/kernel-wsl/build.sh [config|all]
#
# config only makes the configuration, and checks that it has what wsl.config asks for.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin # of depmod

here=$(cd "$(dirname "$0")" && pwd)
cache=${FAIRLEAD_CACHE:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/fairlead}
src=$cache/src/linux
out=$cache/src/linux-wsl
dir=$cache/kernels/wsl

say() { printf 'kernel-wsl: %s\n' "$*"; }
die() { printf 'kernel-wsl: %s\n' "$*" >&2; exit 1; }

step=${1:-all}
case $step in
config | all) ;;
*) die "unknown step '$step': want config or all" ;;
esac
# What is built depends on both files.
key=$(cat "$0" "$here/wsl.config" | sha256sum | cut -c1-16)
if [ "$step" = all ] && [ "$(cat "$dir/key" 2>/dev/null)" = "$key" ]; then
	say "kernel wsl is in the cache"
	exit 0
fi
[ -f "$src/Makefile" ] || die "no source in $src: run hack/provision.sh wsl"
base=$(ls "$cache"/kernels/6.12/boot/config-*) || die "no configuration of Linux 6.12: run hack/provision.sh vm"

# configure makes $out/.config.
configure() {
	mkdir -p "$out"
	cp "$base" "$out/.config"
	# In the form of lsmod(8): what a guest of test/vm has. Other modules are left out.
	{
		echo "Module Size Used by"
		sed -n '/^var modules/,/`)/p' "$here/../../test/vm/image.go" | tr -s '\t ' '\n' | grep -E '^[a-z][a-z0-9_A-Z]+$' | sed 's/$/ 1 0/'
		printf '%s 1 0\n' macvlan ipvlan vxlan geneve bonding ifb vrf wireguard nlmon 9p fuse xt_set ip_vs sctp
	} >"$out/lsmod"
	yes '' 2>/dev/null | kmake LSMOD="$out/lsmod" localmodconfig >"$out/localmodconfig.log" 2>&1 || true
	[ -s "$out/.config" ] || die "localmodconfig failed: $out/localmodconfig.log"
	"$src/scripts/kconfig/merge_config.sh" -m -O "$out" "$out/.config" "$here/wsl.config" >"$out/merge.log" 2>&1 || die "merge failed: $out/merge.log"
	# Debian signs its kernels with keys that are not in the source.
	"$src/scripts/config" --file "$out/.config" --set-str SYSTEM_TRUSTED_KEYS '' --set-str BUILD_SALT '' --disable DEBUG_INFO_NONE --enable DEBUG_INFO_DWARF4
	kmake olddefconfig >"$out/olddefconfig.log" 2>&1 || die "olddefconfig failed: $out/olddefconfig.log"
}

kmake() { make -C "$src" O="$out" "$@"; }

# check compares the configuration with wsl.config: options that depend on others are dropped
# without a word.
check() {
	local line name value got bad=0
	while IFS= read -r line; do
		case $line in CONFIG_*=*) ;; *) continue ;; esac
		name=${line%%=*} value=${line#*=}
		got=$(sed -n "s/^$name=//p" "$out/.config")
		if [ "${got:-n}" != "$value" ]; then
			printf 'kernel-wsl: %s is %s, want %s\n' "$name" "${got:-n}" "$value" >&2
			bad=1
		fi
	done <"$here/wsl.config"
	return $bad
}

say "configuring"
configure
check || die "the configuration differs from wsl.config"
say "configured: $(grep -c '=y$' "$out/.config") built in, $(grep -c '=m$' "$out/.config") modules"
[ "$step" = all ] || exit 0

say "building, with $(nproc) processors"
kmake -j "$(nproc)" bzImage modules >"$out/build.log" 2>&1 || { tail -n 20 "$out/build.log" >&2; die "build failed: $out/build.log"; }
rm -rf "$dir.new"
mkdir -p "$dir.new"
kmake INSTALL_MOD_PATH="$dir.new" INSTALL_MOD_STRIP=1 modules_install >>"$out/build.log" 2>&1
cp "$out/arch/x86/boot/bzImage" "$dir.new/vmlinuz"
kmake -s --no-print-directory kernelrelease >"$dir.new/release"
printf '%s\n' "$key" >"$dir.new/key"
rm -rf "$dir" "$out"
mv "$dir.new" "$dir"
say "built $(cat "$dir/release")"
