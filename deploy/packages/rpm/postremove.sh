#!/bin/sh
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload || :
fi
if [ "$1" -eq 0 ]; then # not an upgrade
	rm -rf /run/fairlead
fi
