#!/bin/busybox sh
# SPDX-License-Identifier: Apache-2.0
# Ends the guest's first process, /init, by starting $system, an init of a Debian on the
# disk, in its place. It has the run script started when everything else is, and the
# machine powered off after that.
for i in $(seq 100); do
	[ -b /dev/nvme0n1 ] && break
	sleep 0.1
done
mkdir -p /system
mount -t ext4 /dev/nvme0n1 /system || poweroff -f
cp -a /test /system/
cp -a /bin/busybox /system/test/
cp -a /lib/modules /system/lib/
cat >/system/test/start.sh <<'END'
exec </dev/null >/dev/ttyS1 2>&1
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8
stty -F /dev/ttyS1 raw -echo
ip link set lo up
. /test/run.sh
sync
/test/busybox poweroff -f
END
case $system in
systemd)
	cd /system/etc/systemd/system
	# What takes time and has nothing to do here.
	for unit in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer getty@tty1.service \
		serial-getty@ttyS0.service serial-getty@ttyS1.service systemd-hwdb-update.service systemd-pstore.service \
		systemd-update-utmp.service ldconfig.service; do
		ln -sf /dev/null "$unit"
	done
	cat >fairlead-test.service <<'END'
[Unit]
After=multi-user.target
[Service]
Type=oneshot
TimeoutStartSec=infinity
ExecStart=/bin/sh /test/start.sh
END
	mkdir -p graphical.target.wants
	ln -s ../fairlead-test.service graphical.target.wants/
	program=/lib/systemd/systemd
	;;
openrc)
	cat >/system/etc/init.d/fairlead-test <<'END'
#!/sbin/openrc-run
depend() { after *; }
start() { /bin/sh /test/start.sh; }
END
	chmod 755 /system/etc/init.d/fairlead-test
	ln -s /etc/init.d/fairlead-test /system/etc/runlevels/default/
	program=/sbin/openrc-init
	;;
*)
	poweroff -f
	;;
esac
cd /
for dir in dev proc sys; do mount --move "/$dir" "/system/$dir"; done
exec switch_root /system "$program"
