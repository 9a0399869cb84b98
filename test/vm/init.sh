#!/bin/busybox sh
# SPDX-License-Identifier: Apache-2.0
# The guest's first process. The kernel's console is one serial port; another one, $port,
# carries what tests print, between lines that the host reads.
/bin/busybox --install -s /bin
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TMPDIR=/tmp
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
port=/dev/$(sed -n 's/.*fairlead\.port=\([^ ]*\).*/\1/p' /proc/cmdline)
system=$(sed -n 's/.*fairlead\.system=\([^ ]*\).*/\1/p' /proc/cmdline)
[ -z "$system" ] || . /system.sh
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mkdir -p /run/netns /run/lock
ln -s /run /var/run 2>/dev/null || { mkdir -p /var && ln -s /run /var/run; }
# Version 1 as WSL and older systemd have it, alone or beside version 2.
cgroup=$(sed -n 's/.*fairlead\.cgroup=\([^ ]*\).*/\1/p' /proc/cmdline)
unified=/sys/fs/cgroup
if [ -n "$cgroup" ]; then
	unified=/sys/fs/cgroup/unified
	mount -t tmpfs cgroup /sys/fs/cgroup
	for c in $(sed -n 's/^\([a-z_]\{1,\}\).*/\1/p' /proc/cgroups) name=systemd; do
		at=/sys/fs/cgroup/${c#name=}
		mkdir "$at"
		mount -t cgroup -o "$(echo "$c" | sed 's/^name=/none,&/')" cgroup "$at" 2>/dev/null || rmdir "$at"
	done
	mkdir "$unified"
fi
[ "$cgroup" = legacy ] || mount -t cgroup2 cgroup "$unified"
mount -t tracefs trace /sys/kernel/tracing
mount -t debugfs debug /sys/kernel/debug
mount -t bpf bpf /sys/fs/bpf
ip link set lo up
stty -F "$port" raw -echo
# Modules that a machine with containers has: a test that wants one to be loaded
# later can remove it first.
modprobe -a nf_tables nft_chain_nat iptable_nat ip6table_nat vsock_loopback tcp_diag udp_diag tun
. /test/run.sh </dev/null >"$port" 2>&1
poweroff -f
