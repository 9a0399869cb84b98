#!/bin/sh
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload || :
fi
if [ "$1" = purge ] || [ "$1" = 0 ]; then
	rm -rf /run/fairlead-run
fi
