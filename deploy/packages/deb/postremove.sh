#!/bin/sh
set -e
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload || :
fi
if [ "$1" = purge ]; then
	rm -rf /etc/fairlead /var/lib/fairlead /run/fairlead /var/log/fairlead.log
fi
